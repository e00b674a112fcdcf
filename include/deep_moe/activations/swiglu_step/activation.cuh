// min(silu(gate), limit) * up, with up within +-limit. A NaN passes through the limits, as in
// torch.clamp.
#pragma once

#include "deep_moe/activations/elementary.cuh"
#include "deep_moe/ptx/min_max.cuh"

namespace deep_moe {

template <class Parameters, bool fast_math>
struct SwigluStep {
    static constexpr bool has_gate = true;
    static constexpr float limit = Parameters::limit;
    static_assert(limit > 0.0f, "limit must be positive");

    static __device__ __forceinline__ float apply(float gate, float up) {
        const float silu = sigmoid_linear<fast_math>(gate, 1.0f);  //~ step_silu
        return ptx::min_nan_f32(silu, limit) * limited(up);        //~ step_limited
    }

    static __device__ __forceinline__ ActivationFactors factors(float gate, float up) {
        ValueAndSlope of_gate = sigmoid_linear_and_slope<fast_math>(gate, 1.0f);
        of_gate.slope = slope_within(of_gate.slope, of_gate.value > limit);  //~ step_gate_slope
        of_gate.value = ptx::min_nan_f32(of_gate.value, limit);
        return {of_gate, {limited(up), slope_within(1.0f, fabsf(up) > limit)}};
    }

 private:
    static __device__ __forceinline__ float limited(float up) {
        return ptx::max_nan_f32(ptx::min_nan_f32(up, limit), -limit);  //~ step_up_limited
    }
};

}  // namespace deep_moe
