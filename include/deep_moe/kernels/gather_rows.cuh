// The rows that experts read: each one its slot's token, padding rows zero, so that they add
// nothing to a weight's gradient. With `rounds_to_mxfp8` as MXFP8 would hold them.
//
// Grid: a warp per row.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/training/expert_rows.cuh"
#include "deep_moe/training/mxfp8_rounding.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void gather_rows(const GatherRowsArgs& args) {
    constexpr uint32_t loads_at_once = 4;
    const uint32_t row = warp_in_grid<Config>();
    if (!is_used_row(args.rows, row)) return;
    const int32_t slot = args.rows.slot_of_row[row];
    const bool is_padding = slot < 0;
    const uint64_t token = is_padding ? 0 : slot / args.num_topk;  //~ token_of_slot
    const uint4* const source = static_cast<const uint4*>(args.tokens) + token * args.num_chunks;
    uint4* const gathered = static_cast<uint4*>(args.gathered) + uint64_t{row} * args.num_chunks;
    for (uint32_t first = 0; first < args.num_chunks; first += loads_at_once * warp_size) {
        uint4 chunks[loads_at_once];
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size + ptx::lane_idx();
            const bool is_zero = is_padding || chunk_idx >= args.num_chunks;  //~ padding_is_zero
            chunks[i] = is_zero ? uint4{} : source[chunk_idx];
        }
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size + ptx::lane_idx();
            if constexpr (Config::rounds_to_mxfp8) chunks[i] = mxfp8_rounded(chunks[i]);
            if (chunk_idx < args.num_chunks) gathered[chunk_idx] = chunks[i];
        }
    }
}

}  // namespace deep_moe
