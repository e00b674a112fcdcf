// The scale of Linear2's input in E4M3, for each token and 128 values.
//
// If possible all k-blocks of a token get the same scale, so that Linear2 adds them up as they are
// (rescaler.cuh). It follows from the routing weight alone, which is a factor of every value (1
// where there are biases): 2^(floor(log2 |weight|) - 1). So silu(gate) * up up to 112 fits, and
// with a clamp of 10 every value. E4M3 is a floating-point format: the position of a block in its
// range matters little until it nears the subnormals. A block gets its own scale if its largest
// value is above 448 of that scale, or below 2^-3 of it, where rounding to E4M3 would err by a
// tenth more than elsewhere. No scale is below 2^-60: the ratio of two scales of a token must not
// take an accumulator out of FP32's range.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe::sm90 {

// No scale below 2^-60: the ratio of two scales of a token must not take an accumulator out of
// FP32's range.
constexpr uint32_t min_scale_byte = 127 - 60;
// The largest that e4m3_scale_byte gives, so that e4m3_factor is a normal number.
constexpr uint32_t max_scale_byte = 247;

// UE8M0 byte of a token's scale, from its routing weight.
__device__ __forceinline__ uint32_t token_scale_byte(float topk_weight) {
    const uint32_t exponent = magnitude_bits(topk_weight) >> 23;
    return min(max(exponent, min_scale_byte + 1) - 1, max_scale_byte);
}

// UE8M0 byte of a block's scale; `amax_bits`: of its 128 values. Zeros have any scale.
__device__ __forceinline__ uint32_t linear2_scale_byte(uint32_t amax_bits, uint32_t token_byte) {
    const uint32_t own_byte = max(e4m3_scale_byte(amax_bits), min_scale_byte);
    const uint32_t smallest = (token_byte - 3) << 23;  // 2^-3 of the token's scale
    const bool fits = own_byte <= token_byte && amax_bits >= smallest;
    return fits || amax_bits == 0 ? token_byte : own_byte;
}

}  // namespace deep_moe::sm90
