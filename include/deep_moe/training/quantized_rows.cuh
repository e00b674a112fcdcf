// A row as E4M3 with a float32 scale for every 128 values: the values, then the scales, then what
// is left of 16 bytes, which means nothing. So rows are gathered like any others.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/bf16_chunk.cuh"
#include "deep_moe/formats/float_scale.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe {

inline constexpr uint32_t chunks_per_scale = 128 / values_per_chunk;

// Of a row of so many chunks of 8 values, a multiple of 16.
__device__ __forceinline__ uint32_t quantized_row_bytes(uint32_t num_chunks) {
    const uint32_t scale_bytes = num_chunks / chunks_per_scale * sizeof(float);
    return num_chunks * values_per_chunk + align_up(scale_bytes, 16u);
}

// Each lane's chunk, which is zero behind the row's last. All 32 lanes; the first one's chunk_idx
// is a multiple of 32.
__device__ __forceinline__ void store_quantized(uint8_t* row, uint32_t num_chunks,
                                                uint32_t chunk_idx, uint4 chunk) {
    const FloatScale<false> scale(group_maximum<chunks_per_scale>(chunk_amax_bits(chunk)));
    if (chunk_idx >= num_chunks) return;
    reinterpret_cast<uint2*>(row)[chunk_idx] = quantize_chunk(chunk, scale.factor);
    if (chunk_idx % chunks_per_scale == 0) {
        float* const scales = reinterpret_cast<float*>(row + num_chunks * values_per_chunk);
        scales[chunk_idx / chunks_per_scale] = scale.scale;  //~ row_scale
    }
}

}  // namespace deep_moe
