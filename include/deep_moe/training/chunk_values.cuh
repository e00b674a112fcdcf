// A chunk of 8 BF16 values as FP32, and back.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"

namespace deep_moe {

struct ChunkValues {
    float values[8];

    static __device__ __forceinline__ ChunkValues of(uint4 chunk) {
        ChunkValues result;
        const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            // BF16 is the upper half of an FP32.
            result.values[2 * i] = __uint_as_float(pairs[i] << 16);
            result.values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
        return result;
    }

    // Rounded to nearest even.
    __device__ __forceinline__ uint4 chunk() const {
        return {ptx::cvt_rn_bf16x2_f32(values[1], values[0]),
                ptx::cvt_rn_bf16x2_f32(values[3], values[2]),
                ptx::cvt_rn_bf16x2_f32(values[5], values[4]),
                ptx::cvt_rn_bf16x2_f32(values[7], values[6])};
    }

    // Plus 8 FP32 values at a multiple of 16 bytes.
    __device__ __forceinline__ void add(const float* addends) {
        const float4 low = reinterpret_cast<const float4*>(addends)[0];
        const float4 high = reinterpret_cast<const float4*>(addends)[1];
        const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) values[i] = __fadd_rn(values[i], all[i]);
    }
};

}  // namespace deep_moe
