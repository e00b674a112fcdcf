// beta * tanh(gate/beta) * sigmoid(gate) * linear_beta * tanh(up/linear_beta): SiLU and the linear
// unit, each with a bound that it approaches smoothly.
#pragma once

#include "deep_moe/activations/elementary.cuh"

namespace deep_moe {

template <class Parameters, bool fast_math>
struct Situ {
    static constexpr bool has_gate = true;
    static constexpr float beta = Parameters::beta;
    static constexpr float linear_beta = Parameters::linear_beta;
    static_assert(beta > 0.0f && linear_beta > 0.0f, "beta and linear_beta must be positive");

    static __device__ __forceinline__ float apply(float gate, float up) {
        const float bounded_gate = bounded_linear<fast_math>(gate, beta);     //~ situ_gate_bounded
        const float bounded_up = bounded_linear<fast_math>(up, linear_beta);  //~ situ_up_bounded
        return bounded_gate * sigmoid<fast_math>(gate) * bounded_up;
    }

    static __device__ __forceinline__ ActivationFactors factors(float gate, float up) {
        const ValueAndSlope bounded = bounded_linear_and_slope<fast_math>(gate, beta);
        const float sigma = sigmoid<fast_math>(gate);
        const float slope =
            sigma * (bounded.slope + bounded.value * (1.0f - sigma));  //~ situ_gate_slope
        return {{bounded.value * sigma, slope},
                bounded_linear_and_slope<fast_math>(up, linear_beta)};
    }
};

}  // namespace deep_moe
