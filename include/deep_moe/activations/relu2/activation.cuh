// relu(up)^2, without a gate. A NaN passes through, as in torch.relu.
#pragma once

#include "deep_moe/ptx/min_max.cuh"

namespace deep_moe {

template <class Parameters, bool fast_math>
struct Relu2 {
    static constexpr bool has_gate = false;

    static __device__ __forceinline__ float apply(float up) {
        const float positive = ptx::max_nan_f32(up, 0.0f);  //~ relu2_positive
        return positive * positive;                         //~ relu2_squared
    }
};

}  // namespace deep_moe
