// min(relu(gate), bound) * up.
#pragma once

#include "deep_moe/activations/elementary.cuh"
#include "deep_moe/ptx/min_max.cuh"

namespace deep_moe {

template <class Parameters, bool fast_math>
struct ToyReglu {
    static constexpr bool has_gate = true;
    static constexpr float bound = Parameters::bound;

    static __device__ __forceinline__ float apply(float gate, float up) {
        return ptx::min_nan_f32(ptx::max_nan_f32(gate, 0.0f), bound) * up;
    }

    static __device__ __forceinline__ ActivationFactors factors(float gate, float up) {
        const float value = ptx::min_nan_f32(ptx::max_nan_f32(gate, 0.0f), bound);
        return {{value, slope_within(1.0f, gate <= 0.0f || gate > bound)}, {up, 1.0f}};
    }
};

}  // namespace deep_moe
