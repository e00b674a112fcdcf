// Conversions between number formats, and approximate functions of activations and routers.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Two floats to BF16, round to nearest even; `high` in the upper half.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two floats to F16, round to nearest even, magnitudes beyond its range to infinity; `high` in the
// upper half.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two floats to E4M3, round to nearest even, magnitudes above 448 become 448; `high` in the upper
// byte.
__device__ __forceinline__ uint16_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two floats to E2M1, round to nearest even, magnitudes above 6 become 6, as does NaN; `high` in
// the upper four of 8 bits. SM100 only.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e2m1x2_f32(float high, float low) {
    uint32_t packed;
    asm("{\n"
        ".reg .b8 pair;\n"
        "cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n"
        "cvt.u32.u8 %0, pair;\n"
        "}"
        : "=r"(packed)
        : "f"(high), "f"(low));
    return packed;
}

// Two E4M3 to F16, exactly; the upper byte to the upper half.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t packed) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
    return halves;
}

// F16 to a float, exactly.
__device__ __forceinline__ float cvt_f32_f16(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// Two F16 to E4M3, as from floats.
__device__ __forceinline__ uint16_t cvt_rn_satfinite_e4m3x2_f16x2(uint32_t halves) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(packed) : "r"(halves));
    return packed;
}

// Two products in F16.
__device__ __forceinline__ uint32_t mul_rn_f16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// The same in BF16.
__device__ __forceinline__ uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Two of a * b + c in BF16, rounded once.
__device__ __forceinline__ uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// 2^x, at most 2 ulp.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x, at most 1 ulp.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
    return reciprocal;
}

// The square root of x, at most 1 ulp.
__device__ __forceinline__ float sqrt_approx_ftz(float x) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

// a / b, at most 2 ulp.
__device__ __forceinline__ float div_full(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

}  // namespace deep_moe::ptx
