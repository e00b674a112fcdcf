// Quantizing FP16 values by chunks of 8, as formats/bf16_chunk.cuh does BF16 ones.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"

namespace deep_moe {

// The values of a pair, exactly.
struct HalfPair {
    float low;
    float high;

    __device__ explicit HalfPair(uint32_t pair)
        : low(ptx::cvt_f32_f16(static_cast<uint16_t>(pair))),
          high(ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16))) {}
};

// Bits of the largest magnitude, as FP32.
__device__ __forceinline__ uint32_t fp16_chunk_amax_bits(uint4 chunk) {
    uint32_t amax_bits = 0;
#pragma unroll
    for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) {
        const HalfPair values(pair);
        amax_bits = max(amax_bits, max(magnitude_bits(values.low), magnitude_bits(values.high)));
    }
    return amax_bits;
}

// Two FP16 values to E4M3.
__device__ __forceinline__ uint32_t quantize_fp16_pair(uint32_t pair, float factor) {
    const HalfPair values(pair);
    return ptx::cvt_rn_satfinite_e4m3x2_f32(values.high * factor, values.low * factor);
}

__device__ __forceinline__ uint2 quantize_fp16_chunk(uint4 chunk, float factor) {
    return {quantize_fp16_pair(chunk.x, factor) | quantize_fp16_pair(chunk.y, factor) << 16,
            quantize_fp16_pair(chunk.z, factor) | quantize_fp16_pair(chunk.w, factor) << 16};
}

}  // namespace deep_moe
