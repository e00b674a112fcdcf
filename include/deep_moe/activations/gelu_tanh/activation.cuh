// gelu(gate) * up, with gelu(g) = 0.5 * g * (1 + tanh(sqrt(2/pi) * (g + 0.044715 * g^3))): that is
// g * sigmoid(t) of t twice tanh's argument.
#pragma once

#include "deep_moe/activations/elementary.cuh"
#include "deep_moe/ptx/min_max.cuh"

namespace deep_moe {

template <class Parameters, bool fast_math>
struct GeluTanh {
    static constexpr bool has_gate = true;
    static constexpr float linear = 1.5957691216057308f;  // 2 * sqrt(2/pi)
    static constexpr float cubic = 0.07135481627260025f;  // 0.044715 times that
    static constexpr float saturated = 100.0f;  // beyond plus and minus it the sigmoid is 1 or 0

    static __device__ __forceinline__ float apply(float gate, float up) { return gelu(gate) * up; }

    static __device__ __forceinline__ ActivationFactors factors(float gate, float up) {
        // Further out the derivative's cube could overflow.
        const float near = ptx::max_nan_f32(ptx::min_nan_f32(gate, saturated), -saturated);
        const float sigma = sigmoid<fast_math>(argument(near));
        //~ gelu_slope
        const float slope =
            sigma * (1.0f + near * (linear + 3.0f * cubic * near * near) * (1.0f - sigma));
        return {{gelu(gate), slope}, {up, 1.0f}};
    }

 private:
    // Of the sigmoid. Where the square overflows, it is infinite as it should be.
    static __device__ __forceinline__ float argument(float gate) {
        return gate * (linear + cubic * (gate * gate));  //~ gelu_argument
    }

    static __device__ __forceinline__ float gelu(float gate) {
        return times_sigmoid<fast_math>(gate, -argument(gate));  //~ gelu_sigmoid
    }
};

}  // namespace deep_moe
