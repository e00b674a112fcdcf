// A warp per row: which rows exist, and the slot and expert of each one.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/training/args.cuh"

namespace deep_moe {

// The warp's place among all warps of the grid.
template <class Config>
__device__ __forceinline__ uint32_t warp_in_grid() {
    static_assert(Config::num_threads % warp_size == 0, "num_threads must be whole warps");
    return blockIdx.x * (Config::num_threads / warp_size) + ptx::warp_idx();
}

// Rows up to the last expert's end; what lies behind belongs to nobody.
__device__ __forceinline__ bool is_used_row(const RowsArgs& rows, uint32_t row) {
    return row < rows.num_rows && row < static_cast<uint32_t>(rows.offs[rows.num_experts - 1]);
}

// The expert whose rows these are: as many experts end at or before it. All 32 lanes, one row.
__device__ __forceinline__ uint32_t expert_of_row(const int32_t* offs, uint32_t num_experts,
                                                  uint32_t row) {
    uint32_t expert = 0;
    for (uint32_t first = 0; first < num_experts; first += warp_size) {
        const uint32_t idx = first + ptx::lane_idx();
        const bool ends = idx < num_experts && static_cast<uint32_t>(offs[idx]) <= row;
        expert += __popc(__ballot_sync(full_warp, ends));
    }
    return expert;
}

}  // namespace deep_moe
