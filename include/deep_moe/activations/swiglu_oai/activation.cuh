// gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within +-limit. A NaN
// passes through the limits, as in torch.clamp.
#pragma once

#include "deep_moe/activations/elementary.cuh"
#include "deep_moe/ptx/min_max.cuh"

namespace deep_moe {

template <class Parameters, bool fast_math>
struct SwigluOai {
    static constexpr bool has_gate = true;
    static constexpr float alpha = Parameters::alpha;
    static constexpr float limit = Parameters::limit;
    static_assert(alpha > 0.0f && limit > 0.0f, "alpha and limit must be positive");

    static __device__ __forceinline__ float apply(float gate, float up) {
        gate = ptx::min_nan_f32(gate, limit);                         //~ oai_gate_limited
        up = ptx::max_nan_f32(ptx::min_nan_f32(up, limit), -limit);   //~ oai_up_limited
        return sigmoid_linear<fast_math>(gate, alpha) * (up + 1.0f);  //~ oai_product
    }

    static __device__ __forceinline__ ActivationFactors factors(float gate, float up) {
        ValueAndSlope of_gate =
            sigmoid_linear_and_slope<fast_math>(ptx::min_nan_f32(gate, limit), alpha);
        of_gate.slope = slope_within(of_gate.slope, gate > limit);
        const float bounded_up = ptx::max_nan_f32(ptx::min_nan_f32(up, limit), -limit);
        return {of_gate, {bounded_up + 1.0f, slope_within(1.0f, fabsf(up) > limit)}};
    }
};

}  // namespace deep_moe
