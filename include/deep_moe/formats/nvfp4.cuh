// How a group of 16 values becomes E2M1 with an E4M3 scale beside a float that is known before: a
// token's scale, or the constant of Linear1's output. The rule of deep_moe/formats/nvfp4.py.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"

namespace deep_moe {

inline constexpr uint32_t fp4_group_size = 16;
// A code times a scale is at most 6 * 448, which is what the largest magnitude becomes.
inline constexpr float fp4_largest = 6.0f * 448.0f;
// A token whose largest magnitude is smaller is quantized as if it held this one, so that neither
// its scale nor the inverse leaves the range of normal numbers.
inline constexpr float min_fp4_token_amax = 0x1p-100f;

// The float beside the scales of Linear1's output, the same for all tokens: blocks of up to 672
// keep their largest value, and those of less than 0.0015 become zero.
inline constexpr float fp4_linear2_scale = 0.25f;

// 1 / scale, rounded to nearest, for a number that E4M3 holds; 0 for 0. One step behind the
// approximation suffices: the 8 mantissas that there are lead to the right number from whichever
// of its neighbours.
__device__ __forceinline__ float e4m3_reciprocal(float scale) {
    const float approximate = ptx::rcp_approx_ftz(scale);
    const float rounded = fmaf(approximate, fmaf(-scale, approximate, 1.0f), approximate);
    return scale == 0.0f ? 0.0f : rounded;  //~ fp4_zero_scale
}

// Of two groups: scale bytes, the second one's above the first one's, and what values are
// multiplied by before they become E2M1.
struct Fp4Groups {
    uint16_t scale_bytes;
    float factors[2];

    // amax_bits: of each group's largest magnitude, as FP32. inverse: of the float beside the
    // scales. E2M1 has no NaN: a group with an infinity or a NaN gets a scale that is NaN.
    __device__ Fp4Groups(uint32_t amax_bits0, uint32_t amax_bits1, float inverse) {
        scale_bytes = ptx::cvt_rn_satfinite_e4m3x2_f32(wanted(amax_bits1, inverse),
                                                       wanted(amax_bits0, inverse));
        const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(scale_bytes);
        factors[0] = inverse * e4m3_reciprocal(ptx::cvt_f32_f16(static_cast<uint16_t>(halves)));
        factors[1] =
            inverse * e4m3_reciprocal(ptx::cvt_f32_f16(static_cast<uint16_t>(halves >> 16)));
    }

 private:
    // The scale that would make the largest value 6.
    static __device__ __forceinline__ float wanted(uint32_t amax_bits, float inverse) {
        const float amax = __uint_as_float(amax_bits < 0x7f800000u ? amax_bits : 0x7fffffffu);
        return amax * inverse * (1.0f / 6.0f);
    }
};

}  // namespace deep_moe
