// silu(gate) * up, both bounded first where there is a clamp. A NaN passes through the clamp, as in
// torch.clamp.
#pragma once

#include "deep_moe/activations/elementary.cuh"
#include "deep_moe/ptx/min_max.cuh"

namespace deep_moe {

template <class Parameters, bool fast_math>
struct Swiglu {
    static constexpr bool has_gate = true;
    static constexpr float clamp = Parameters::clamp;
    static_assert(clamp > 0.0f, "clamp must be positive; +inf means none");

    static __device__ __forceinline__ float apply(float gate, float up) {
        constexpr float largest_float = 3.40282347e38f;
        if constexpr (clamp <= largest_float) {
            gate = ptx::min_nan_f32(gate, clamp);                        //~ swiglu_gate_clamped
            up = ptx::max_nan_f32(ptx::min_nan_f32(up, clamp), -clamp);  //~ swiglu_up_clamped
        }
        return sigmoid_linear<fast_math>(gate, 1.0f) * up;
    }

    static __device__ __forceinline__ ActivationFactors factors(float gate, float up) {
        constexpr float largest_float = 3.40282347e38f;
        if constexpr (clamp <= largest_float) {
            const float bounded_up = ptx::max_nan_f32(ptx::min_nan_f32(up, clamp), -clamp);
            ValueAndSlope of_gate =
                sigmoid_linear_and_slope<fast_math>(ptx::min_nan_f32(gate, clamp), 1.0f);
            of_gate.slope = slope_within(of_gate.slope, gate > clamp);  //~ swiglu_gate_slope
            return {of_gate, {bounded_up, slope_within(1.0f, fabsf(up) > clamp)}};
        } else {
            return {sigmoid_linear_and_slope<fast_math>(gate, 1.0f), {up, 1.0f}};
        }
    }
};

}  // namespace deep_moe
