// Quantized rows (training/quantized_rows.cuh) as BF16.
//
// Grid: a warp per row.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/training/args.cuh"
#include "deep_moe/training/chunk_values.cuh"
#include "deep_moe/training/expert_rows.cuh"
#include "deep_moe/training/quantized_rows.cuh"

namespace deep_moe {

// 8 E4M3 values times their scale, rounded once.
__device__ __forceinline__ uint4 dequantized_chunk(uint2 bytes, float scale) {
    ChunkValues result;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t pair = (i < 2 ? bytes.x : bytes.y) >> i % 2 * 16;
        const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(pair));
        result.values[2 * i] = ptx::cvt_f32_f16(static_cast<uint16_t>(halves)) * scale;
        result.values[2 * i + 1] = ptx::cvt_f32_f16(static_cast<uint16_t>(halves >> 16)) * scale;
    }
    return result.chunk();
}

template <class Config>
__device__ __forceinline__ void dequantize_rows(const QuantizeRowsArgs& args) {
    const uint64_t row = warp_in_grid<Config>();
    if (row >= args.num_rows) return;
    uint4* const values = static_cast<uint4*>(args.values) + row * args.num_chunks;
    const uint8_t* const quantized =
        static_cast<const uint8_t*>(args.quantized) + row * quantized_row_bytes(args.num_chunks);
    const float* const scales =
        reinterpret_cast<const float*>(quantized + args.num_chunks * values_per_chunk);
    for (uint32_t i = ptx::lane_idx(); i < args.num_chunks; i += warp_size) {
        values[i] = dequantized_chunk(reinterpret_cast<const uint2*>(quantized)[i],
                                      scales[i / chunks_per_scale]);  //~ kept_rows_scale
    }
}

}  // namespace deep_moe
