// Functions that activations are made of, in FP32. fast: use the hardware's approximations of the
// exponential and the reciprocal. All functions pass NaN on.
#pragma once

#include "deep_moe/ptx/convert.cuh"

namespace deep_moe {

// A function's value and its derivative.
struct ValueAndSlope {
    float value;
    float slope;
};

// An activation is a product of a function of gate and one of up; so are its two derivatives.
struct ActivationFactors {
    ValueAndSlope gate;
    ValueAndSlope up;
};

template <bool fast>
__device__ __forceinline__ float exponential(float x) {
    if constexpr (fast) {
        constexpr float log2_e = 1.44269504f;
        return ptx::ex2_approx_ftz(log2_e * x);
    } else {
        return expf(x);
    }
}

// x * sigmoid(t), given -t.
template <bool fast>
__device__ __forceinline__ float times_sigmoid(float x, float minus_t) {
    const float denominator = 1.0f + exponential<fast>(minus_t);
    if constexpr (fast) {
        return x * ptx::rcp_approx_ftz(denominator);
    } else {
        return x / denominator;
    }
}

// x / (1 + e^(-slope*x)). Both forms give -0 for very negative x and x for very large x.
template <bool fast>
__device__ __forceinline__ float sigmoid_linear(float x, float slope) {
    return times_sigmoid<fast>(x, -slope * x);
}

// 1 / (1 + e^-x).
template <bool fast>
__device__ __forceinline__ float sigmoid(float x) {
    const float denominator = 1.0f + exponential<fast>(-x);
    if constexpr (fast) {
        return ptx::rcp_approx_ftz(denominator);
    } else {
        return 1.0f / denominator;
    }
}

// bound * tanh(x / bound): x near zero, and never beyond +-bound. Near zero 1 - 2 / (1 + e^2t)
// would cancel, so x is multiplied by a series of tanh(t) / t instead. So no size of `bound` costs
// precision.
template <bool fast>
__device__ __forceinline__ float bounded_linear(float x, float bound) {
    if constexpr (fast) {
        const float t = x * (1.0f / bound);
        const float t2 = t * t;
        // tanh(t)/t is 1 - t^2/3 + 2/15 t^4 - 17/315 t^6 + 62/2835 t^8 - ...
        const float near_zero =
            x + x * (t2 * (-1.0f / 3.0f + t2 * (2.0f / 15.0f - 17.0f / 315.0f * t2)));
        const float elsewhere =
            bound * (1.0f - 2.0f * ptx::rcp_approx_ftz(1.0f + exponential<fast>(2.0f * t)));
        return fabsf(t) < 0.25f ? near_zero : elsewhere;  //~ tanh_chosen
    } else {
        const float t = x / bound;
        constexpr float tanh_is_its_argument_below = 0x1p-13f;
        return fabsf(t) < tanh_is_its_argument_below ? x : bound * tanhf(t);
    }
}

// Derivative of x * sigmoid(slope * x). Where the sigmoid is 0, the derivative is 0, for every
// finite x.
template <bool fast>
__device__ __forceinline__ ValueAndSlope sigmoid_linear_and_slope(float x, float slope) {
    const float sigma = sigmoid<fast>(slope * x);
    return {sigmoid_linear<fast>(x, slope), sigma * (1.0f + slope * x * (1.0f - sigma))};
}

// Derivative of bounded_linear: bound * tanh(x / bound) has 1 - tanh^2.
template <bool fast>
__device__ __forceinline__ ValueAndSlope bounded_linear_and_slope(float x, float bound) {
    const float value = bounded_linear<fast>(x, bound);
    const float tanh = value / bound;
    return {value, (1.0f - tanh) * (1.0f + tanh)};
}

// Derivative of a clamp: 1 for x within the limits, 0 beyond them. NaN passes the derivative on.
__device__ __forceinline__ float slope_within(float slope, bool is_beyond) {
    return is_beyond ? 0.0f : slope;
}

}  // namespace deep_moe
