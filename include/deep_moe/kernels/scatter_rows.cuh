// Rows go back to their tokens: the sum over a token's used slots, in slot order, of routing weight
// * (row + bias). Products and sums are in FP32, each rounded; the end is rounded to BF16 once.
// Each value is written once by one lane, so that no atomic decides an order.
//
// Grid: a warp for 32 neighbouring chunks of a token.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/training/chunk_values.cuh"
#include "deep_moe/training/expert_rows.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void scatter_rows(const ScatterRowsArgs& args) {
    constexpr uint32_t loads_at_once = 4;
    const uint32_t num_parts = ceil_div(args.num_chunks, warp_size);
    const uint32_t warp_idx = warp_in_grid<Config>();
    const uint32_t token = warp_idx / num_parts;
    if (token >= args.num_tokens) return;
    const uint32_t chunk_idx = warp_idx % num_parts * warp_size + ptx::lane_idx();
    const bool is_valid = chunk_idx < args.num_chunks;
    // Lanes stand for the token's slots first.
    int32_t row_of_lane = -1;
    float weight_of_lane = 1.0f;
    if (ptx::lane_idx() < args.num_topk) {
        const uint32_t slot = token * args.num_topk + ptx::lane_idx();
        row_of_lane = args.row_of_slot[slot];
        if constexpr (Config::has_topk_weights) weight_of_lane = args.topk_weights[slot];
    }
    ChunkValues sum = {};
    for (uint32_t first = 0; first < args.num_topk; first += loads_at_once) {
        uint4 chunks[loads_at_once][Config::num_sources] = {};
        int32_t rows[loads_at_once];
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            rows[i] = __shfl_sync(full_warp, row_of_lane, (first + i) % warp_size);
            if (first + i >= args.num_topk) rows[i] = -1;
            if (rows[i] < 0 || !is_valid) continue;
            const uint64_t place = uint64_t(rows[i]) * args.num_chunks + chunk_idx;
            chunks[i][0] = static_cast<const uint4*>(args.first)[place];
            if constexpr (Config::num_sources == 2) {
                chunks[i][1] = static_cast<const uint4*>(args.second)[place];
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const float weight = __shfl_sync(full_warp, weight_of_lane, (first + i) % warp_size);
            if (rows[i] < 0) continue;  //~ unused_slot_skipped
            ChunkValues row = ChunkValues::of(chunks[i][0]);
            if constexpr (Config::num_sources == 2) {
                const ChunkValues second = ChunkValues::of(chunks[i][1]);
#pragma unroll
                for (uint32_t j = 0; j < 8; ++j) {
                    row.values[j] =
                        __fadd_rn(row.values[j], second.values[j]);  //~ second_row_added
                }
            }
            if constexpr (Config::has_biases) {
                const uint64_t expert = expert_of_row(args.offs, args.num_experts, rows[i]);
                if (is_valid) {
                    row.add(args.bias +
                            (expert * args.num_chunks + chunk_idx) * 8);  //~ bias_of_row
                }
            }
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) {
                if constexpr (Config::has_topk_weights) {
                    row.values[j] = __fmul_rn(weight, row.values[j]);  //~ row_weighted
                }
                sum.values[j] = __fadd_rn(sum.values[j], row.values[j]);
            }
        }
    }
    if (is_valid) {
        static_cast<uint4*>(args.tokens)[uint64_t{token} * args.num_chunks + chunk_idx] =
            sum.chunk();
    }
}

}  // namespace deep_moe
