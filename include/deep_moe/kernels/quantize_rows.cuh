// Tokens as E4M3 with a float32 scale for every 128 values (training/quantized_rows.cuh).
//
// Grid: a warp per row.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/training/args.cuh"
#include "deep_moe/training/expert_rows.cuh"
#include "deep_moe/training/quantized_rows.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void quantize_rows(const QuantizeRowsArgs& args) {
    const uint64_t row = warp_in_grid<Config>();
    if (row >= args.num_rows) return;
    const uint4* const values = static_cast<const uint4*>(args.values) + row * args.num_chunks;
    uint8_t* const quantized =
        static_cast<uint8_t*>(args.quantized) + row * quantized_row_bytes(args.num_chunks);
    for (uint32_t first = 0; first < args.num_chunks; first += warp_size) {
        const uint32_t chunk_idx = first + ptx::lane_idx();
        const uint4 chunk = chunk_idx < args.num_chunks ? values[chunk_idx] : uint4{};
        store_quantized(quantized, args.num_chunks, chunk_idx, chunk);
    }
}

}  // namespace deep_moe
