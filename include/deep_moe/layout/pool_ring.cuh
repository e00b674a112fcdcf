// Where the rows of a pool block are in the pool. A call may have more pool blocks than the pool
// has places. Then the pool is a ring, in which block n takes the place of block n - num_blocks.
//
// Counts, masks and releases are indexed by pool block, because they are set by reductions and
// cannot be used again within a call. Rows, their scales, routing weights and sources are indexed
// by place.
//
// An m-block of several pool blocks begins at the place of its first one and goes on in one piece,
// in the last places into rows behind them. So its further pool blocks may be elsewhere than at
// their places; still a row belongs to pool blocks only whose numbers differ by multiples of
// num_blocks.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

template <class Config>
struct PoolRing {
    static constexpr uint32_t num_blocks = Config::num_ring_blocks;
    // Whether a call may use a place twice.
    static constexpr bool wraps = Config::pool_wraps;

    static __device__ __forceinline__ uint32_t place_of(uint32_t pool_block_idx) {
        if constexpr (wraps) return pool_block_idx % num_blocks;  //~ ring_place
        return pool_block_idx;
    }

    // Of an m-block, given by its first pool block.
    static __device__ __forceinline__ uint32_t first_row(uint32_t pool_block_idx) {
        return place_of(pool_block_idx) * Config::block_m_step;
    }
};

}  // namespace deep_moe
