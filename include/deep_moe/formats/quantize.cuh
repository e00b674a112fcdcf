// How a group of 32 values becomes E4M3 with one UE8M0 scale: the rule of
// deep_moe/formats/block_scaled.py, for Linear1's output and for the inputs.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"

namespace deep_moe {

// Bit pattern of |x|. Patterns order like magnitudes, with infinity above all numbers and NaN above
// infinity, so an integer maximum never loses either.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}

// The UE8M0 byte b (scale 2^(b-127)) of a group of values with this largest magnitude: the smallest
// power of two s with amax <= 448*s, that is 2^ceil(log2(amax/448)), exactly.
//
// 448 is 1.75 * 2^8: the exponent is amax's own minus 8, plus one if its mantissa exceeds 1.75; the
// addition carries into the exponent just then. Zero and everything up to 448 * 2^-127 take byte 0,
// the largest float takes 247, and so do infinity and NaN.
__device__ __forceinline__ uint32_t e4m3_scale_byte(uint32_t amax_bits) {
    const uint32_t exponent = (amax_bits + 0x1fffffu) >> 23;
    return min(max(exponent, 8u), 255u) - 8u;
}

// What values are multiplied by before they become E4M3: 2^(127-b), a normal number for every b
// that e4m3_scale_byte gives, so nothing overflows for a tiny amax. E4M3 has no infinity, and
// saturating would turn one into a plausible number: a group with an infinity or a NaN becomes all
// NaN.
__device__ __forceinline__ float e4m3_factor(uint32_t amax_bits, uint32_t scale_byte) {
    const bool is_finite = amax_bits < 0x7f800000u;
    return __uint_as_float(is_finite ? (254u - scale_byte) << 23 : 0x7fffffffu);
}

}  // namespace deep_moe
