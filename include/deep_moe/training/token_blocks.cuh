// Rows of each expert in blocks of 128, from its first one, as products have them whose sums go
// over rows. An expert without rows has a block of zeros.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

inline constexpr uint32_t rows_per_block = 128;

// Of an expert. offs: where each one's rows end.
__device__ __forceinline__ uint32_t first_row_of(const int32_t* offs, uint32_t expert) {
    return expert == 0 ? 0 : offs[expert - 1];
}

__device__ __forceinline__ uint32_t num_row_blocks_of(const int32_t* offs, uint32_t expert) {
    const uint32_t num_rows = offs[expert] - first_row_of(offs, expert);
    return max(ceil_div(num_rows, rows_per_block), 1u);  //~ block_of_zeros
}

// Rows that a block has, none where it is of zeros or behind all others.
struct RowBlock {
    uint32_t begin;
    uint32_t end;
    bool exists;
};

// Of block `idx` of all experts. All 32 lanes.
__device__ __forceinline__ RowBlock row_block(const int32_t* offs, uint32_t num_experts,
                                              uint32_t idx) {
    uint32_t first_block = 0;  // of the experts from `first` on
    for (uint32_t first = 0; first < num_experts; first += warp_size) {
        const uint32_t expert = first + ptx::lane_idx();
        const uint32_t num_blocks = expert < num_experts ? num_row_blocks_of(offs, expert) : 0;
        uint32_t end = num_blocks;
#pragma unroll
        for (uint32_t distance = 1; distance < warp_size; distance *= 2) {
            const uint32_t before = __shfl_up_sync(full_warp, end, distance);
            if (ptx::lane_idx() >= distance) end += before;
        }
        end += first_block;
        const uint32_t ends_behind = __ballot_sync(full_warp, idx < end);
        if (ends_behind != 0) {
            const uint32_t lane = __ffs(ends_behind) - 1;
            const uint32_t own = idx - __shfl_sync(full_warp, end - num_blocks, lane);
            const uint32_t begin = first_row_of(offs, first + lane) + own * rows_per_block;
            const uint32_t rows_end = offs[first + lane];
            return {begin, min(begin + rows_per_block, rows_end), true};  //~ end_of_row_block
        }
        first_block = __shfl_sync(full_warp, end, warp_size - 1);
    }
    return {0, 0, false};
}

}  // namespace deep_moe
