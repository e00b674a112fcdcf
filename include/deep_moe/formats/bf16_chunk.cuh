// Quantizing BF16 values by chunks of 8, which a lane loads with 16 bytes. Lanes that lie side by
// side share a scale.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"

namespace deep_moe {

inline constexpr uint32_t values_per_chunk = 8;

// Bits of the largest magnitude, as FP32.
__device__ __forceinline__ uint32_t chunk_amax_bits(uint4 chunk) {
    uint32_t low = 0;
    uint32_t high = 0;
#pragma unroll
    for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) {
        low = max(low, pair << 16 & 0x7fff0000u);  //~ magnitude
        high = max(high, pair & 0x7fff0000u);
    }
    return max(low, high);
}

// The largest value of `num_lanes` neighbouring lanes, in all of them. All 32 lanes.
template <uint32_t num_lanes>
__device__ __forceinline__ uint32_t group_maximum(uint32_t value) {
#pragma unroll
    for (uint32_t lane_mask = 1; lane_mask < num_lanes; lane_mask *= 2) {  //~ group_maximum
        value = max(value, __shfl_xor_sync(full_warp, value, lane_mask));
    }
    return value;
}

// Two BF16 values to E4M3.
__device__ __forceinline__ uint32_t quantize_pair(uint32_t pair, float factor) {
    const float low = __uint_as_float(pair << 16);
    const float high = __uint_as_float(pair & 0xffff0000u);
    return ptx::cvt_rn_satfinite_e4m3x2_f32(high * factor, low * factor);
}

// Two BF16 values to E2M1. SM100 only.
__device__ __forceinline__ uint32_t quantize_pair_to_fp4(uint32_t pair, float factor) {
    const float low = __uint_as_float(pair << 16);
    const float high = __uint_as_float(pair & 0xffff0000u);
    return ptx::cvt_rn_satfinite_e2m1x2_f32(high * factor, low * factor);
}

__device__ __forceinline__ uint32_t quantize_chunk_to_fp4(uint4 chunk, float factor) {
    return quantize_pair_to_fp4(chunk.x, factor) | quantize_pair_to_fp4(chunk.y, factor) << 8 |
           quantize_pair_to_fp4(chunk.z, factor) << 16 |
           quantize_pair_to_fp4(chunk.w, factor) << 24;
}

__device__ __forceinline__ uint2 quantize_chunk(uint4 chunk, float factor) {
    return {quantize_pair(chunk.x, factor) | quantize_pair(chunk.y, factor) << 16,
            quantize_pair(chunk.z, factor) | quantize_pair(chunk.w, factor) << 16};
}

}  // namespace deep_moe
