// How every activation is applied to FP32 accumulators of Linear1.
//
// An activation is a struct `Config::Activation`, in a folder of its name here. Its parameters and
// `fast_math` are compile-time constants. If it `has_gate`, `static float apply(float gate, float
// up)` is its value. For training, `static ActivationFactors factors(float gate, float up)` gives
// its two factors with their derivatives. Without a gate it has `static float apply(float up)`.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"

namespace deep_moe {

// activation(gate, up) * weight. Gate and up are rounded to BF16 first, as if Linear1 had stored
// its result; everything after is FP32.
template <class Config>
__device__ __forceinline__ float apply_activation(float gate, float up, float topk_weight) {
    const uint32_t rounded = ptx::cvt_rn_bf16x2_f32(up, gate);  //~ gate_up_rounded
    gate = __uint_as_float(rounded << 16);
    up = __uint_as_float(rounded & 0xffff0000u);
    return Config::Activation::apply(gate, up) * topk_weight;  //~ activation_applied
}

// The same without a gate, of two rows.
template <class Config>
__device__ __forceinline__ float2 apply_activation_to_two(float first, float second,
                                                          float topk_weight) {
    const uint32_t rounded = ptx::cvt_rn_bf16x2_f32(second, first);  //~ two_rounded
    first = Config::Activation::apply(__uint_as_float(rounded << 16)) * topk_weight;
    second = Config::Activation::apply(__uint_as_float(rounded & 0xffff0000u)) *
             topk_weight;  //~ second_applied
    return {first, second};
}

}  // namespace deep_moe
