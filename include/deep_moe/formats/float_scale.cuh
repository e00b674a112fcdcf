// How a group of values becomes E4M3 with one FP32 scale, any number or a power of two: the rules
// of deep_moe/formats/float_scaled.py.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe {

// A group whose largest magnitude is smaller is quantized as if it held this one, so that neither
// the scale nor its inverse leaves the range of normal numbers.
inline constexpr float min_group_amax = 1e-4f;

// The scale and what values are multiplied by, for the bits of a group's largest magnitude. With an
// infinity or a NaN among them all values become NaN.
template <bool is_power_of_two>
struct FloatScale {
    float scale;
    float factor;

    __device__ explicit FloatScale(uint32_t amax_bits) {
        const uint32_t least_bits = max(amax_bits, __float_as_uint(min_group_amax));
        const bool is_finite = amax_bits < 0x7f800000u;
        if constexpr (is_power_of_two) {
            const uint32_t scale_byte =
                e4m3_scale_byte(least_bits);  // never 0: the scale is normal
            scale = is_finite ? __uint_as_float(scale_byte << 23) : 1.0f;
            factor = e4m3_factor(amax_bits, scale_byte);
        } else {
            const float amax = __uint_as_float(least_bits);
            scale = is_finite ? amax * (1.0f / 448.0f) : 1.0f;
            factor = is_finite ? __fdiv_rn(448.0f, amax) : __uint_as_float(0x7fffffffu);
        }
    }
};

}  // namespace deep_moe
