// BF16 values as MXFP8 holds them: E4M3 with a UE8M0 scale for every 32, and back to BF16, which
// holds every such product that float32 does not flush: four significant bits.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/bf16_chunk.cuh"
#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/ptx/convert.cuh"

namespace deep_moe {

// 2^(byte - 127).
__device__ __forceinline__ float ue8m0_value(uint32_t scale_byte) {
    constexpr uint32_t two_to_minus_127 = 1u << 22;  // not normalized
    return __uint_as_float(scale_byte == 0 ? two_to_minus_127 : scale_byte << 23);
}

// Two E4M3 times their scale, in BF16.
__device__ __forceinline__ uint32_t dequantized_pair(uint32_t packed, float scale) {
    const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(packed));
    const float low = ptx::cvt_f32_f16(static_cast<uint16_t>(halves));
    const float high = ptx::cvt_f32_f16(static_cast<uint16_t>(halves >> 16));
    return ptx::cvt_rn_bf16x2_f32(high * scale, low * scale);
}

// A chunk, where four neighbouring lanes have the 32 values of a scale. All 32 lanes.
__device__ __forceinline__ uint4 mxfp8_rounded(uint4 chunk) {
    constexpr uint32_t lanes_per_scale = 32 / values_per_chunk;
    const uint32_t amax_bits = group_maximum<lanes_per_scale>(chunk_amax_bits(chunk));
    const uint32_t scale_byte = e4m3_scale_byte(amax_bits);
    const float factor = e4m3_factor(amax_bits, scale_byte);
    const float scale = ue8m0_value(scale_byte);
    const uint2 quantized = quantize_chunk(chunk, factor);
    return {
        dequantized_pair(quantized.x & 0xffffu, scale), dequantized_pair(quantized.x >> 16, scale),
        dequantized_pair(quantized.y & 0xffffu, scale), dequantized_pair(quantized.y >> 16, scale)};
}

}  // namespace deep_moe
