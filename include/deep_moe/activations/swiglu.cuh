// Between the two linear layers: SwiGLU.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/min_max.cuh"

namespace deep_moe {

// x / (1 + e^-x). Both forms give -0 for very negative x and x for very large x.
template <class Config>
__device__ __forceinline__ float silu(float x) {
    if constexpr (Config::fast_math) {
        constexpr float log2_e = 1.44269504f;
        return x * ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-log2_e * x));
    } else {
        return x / (1.0f + expf(-x));
    }
}

// silu(gate) * up * weight of FP32 accumulators. They are rounded to BF16 first, as if Linear1 had
// stored its result; everything after is FP32. A NaN passes through the clamp, as in torch.clamp.
template <class Config>
__device__ __forceinline__ float swiglu(float gate, float up, float topk_weight) {
    constexpr float clamp = Config::activation_clamp;
    constexpr float largest_float = 3.40282347e38f;
    static_assert(clamp > 0.0f, "activation_clamp must be positive; +inf means none");
    const uint32_t rounded = ptx::cvt_rn_bf16x2_f32(up, gate);
    gate = __uint_as_float(rounded << 16);
    up = __uint_as_float(rounded & 0xffff0000u);
    if constexpr (clamp <= largest_float) {
        gate = ptx::min_nan_f32(gate, clamp);
        up = ptx::max_nan_f32(ptx::min_nan_f32(up, clamp), -clamp);
    }
    return silu<Config>(gate) * up * topk_weight;
}

}  // namespace deep_moe
