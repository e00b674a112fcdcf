// The rows that experts read. Each row is its slot's token. Padding rows are zero, so that they add
// nothing to a weight's gradient. With `rounds_to_mxfp8` the values are rounded as MXFP8 holds
// them.
//
// A token is loaded once and stored to all of its rows, which lie far apart. Read row by row, most
// of its top-k loads would go to memory.
//
// Grid: a warp for 32 * Config::chunks_per_lane neighbouring chunks of a token; then one for 32
// neighbouring rows, of which it clears those that are padding.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/training/expert_rows.cuh"
#include "deep_moe/training/mxfp8_rounding.cuh"

namespace deep_moe {

// A whole warp: chunks of a token from the first one on, to the rows of all its used slots.
template <class Config>
__device__ __forceinline__ void spread_token(const GatherRowsArgs& args, uint32_t token,
                                             uint32_t first_chunk) {
    int32_t row_of_lane = -1;
    if (ptx::lane_idx() < args.num_topk) {
        row_of_lane = args.row_of_slot[token * args.num_topk + ptx::lane_idx()];  //~ rows_of_token
    }
    uint32_t used_lanes = __ballot_sync(full_warp, row_of_lane >= 0);  //~ used_slots_only
    if (used_lanes == 0) return;
    const uint4* const source =
        static_cast<const uint4*>(args.tokens) + uint64_t{token} * args.num_chunks;
    uint4 chunks[Config::chunks_per_lane];
#pragma unroll
    for (uint32_t i = 0; i < Config::chunks_per_lane; ++i) {
        const uint32_t chunk_idx = first_chunk + i * warp_size + ptx::lane_idx();
        chunks[i] = chunk_idx < args.num_chunks ? source[chunk_idx] : uint4{};
    }
    if constexpr (Config::rounds_to_mxfp8) {
#pragma unroll
        for (uint32_t i = 0; i < Config::chunks_per_lane; ++i) {
            chunks[i] = mxfp8_rounded(chunks[i]);  //~ gathered_rounded
        }
    }
    while (used_lanes != 0) {
        const uint32_t row = __shfl_sync(full_warp, row_of_lane, __ffs(used_lanes) - 1);
        used_lanes &= used_lanes - 1;
        uint4* const gathered =
            static_cast<uint4*>(args.gathered) + uint64_t{row} * args.num_chunks;
#pragma unroll
        for (uint32_t i = 0; i < Config::chunks_per_lane; ++i) {
            const uint32_t chunk_idx = first_chunk + i * warp_size + ptx::lane_idx();
            if (chunk_idx < args.num_chunks) gathered[chunk_idx] = chunks[i];
        }
    }
}

// A whole warp: zeros to the padding among 32 rows.
__device__ __forceinline__ void clear_padding(const GatherRowsArgs& args, uint32_t first_row) {
    const uint32_t row = first_row + ptx::lane_idx();
    const bool is_padding = is_used_row(args.rows, row) && args.rows.slot_of_row[row] < 0;
    uint32_t lanes = __ballot_sync(full_warp, is_padding);
    while (lanes != 0) {
        const uint64_t cleared = first_row + __ffs(lanes) - 1;
        lanes &= lanes - 1;
        uint4* const gathered = static_cast<uint4*>(args.gathered) + cleared * args.num_chunks;
        for (uint32_t i = ptx::lane_idx(); i < args.num_chunks; i += warp_size) {
            gathered[i] = uint4{};  //~ padding_is_zero
        }
    }
}

template <class Config>
__device__ __forceinline__ void gather_rows(const GatherRowsArgs& args) {
    constexpr uint32_t chunks_per_warp = Config::chunks_per_lane * warp_size;
    const uint32_t num_parts = ceil_div(args.num_chunks, chunks_per_warp);
    const uint32_t num_token_warps = args.num_tokens * num_parts;
    const uint32_t warp_idx = warp_in_grid<Config>();
    if (warp_idx < num_token_warps) {
        spread_token<Config>(args, warp_idx / num_parts, warp_idx % num_parts * chunks_per_warp);
    } else {
        clear_padding(args, (warp_idx - num_token_warps) * warp_size);
    }
}

}  // namespace deep_moe
