// Cuts an expert's tokens into m-blocks, and its part of the pool into pool blocks.
//
// A pool block is block_m_step rows, and an m-block is one or several pool blocks. An expert starts
// at a pool block. If min_block_m is block_m, all m-blocks have that size. Otherwise sizes differ:
// an expert gets as few m-blocks as possible, of min_block_m to block_m rows each, as equal as
// block_m_step allows, the larger ones first. So few rows are multiplied for nothing.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"

namespace deep_moe {

template <class Config>
inline constexpr bool has_mixed_tiles = Config::min_block_m != Config::block_m;

template <class Config>
class ExpertTiles {
    static constexpr uint32_t step = Config::block_m_step;
    static constexpr uint32_t max_steps = Config::block_m / step;  // of an m-block
    static constexpr uint32_t min_steps = Config::min_block_m / step;
    static_assert(Config::block_m % step == 0 && Config::min_block_m % step == 0);
    static_assert(0 < min_steps && min_steps <= max_steps);
    static_assert(has_mixed_tiles<Config> || max_steps == 1, "pool blocks are m-blocks");

 public:
    __device__ explicit ExpertTiles(uint32_t num_tokens)
        : num_pool_blocks_(
              max(ceil_div(num_tokens, step), ceil_div(num_tokens, Config::block_m) * min_steps)) {}

    __device__ uint32_t num_pool_blocks() const { return num_pool_blocks_; }
    __device__ uint32_t num_m_blocks() const { return ceil_div(num_pool_blocks_, max_steps); }

    // First pool block of an m-block, counted from the expert's first, and how many it has.
    __device__ uint32_t first_pool_block(uint32_t m_block_idx) const {
        if constexpr (!has_mixed_tiles<Config>) return m_block_idx;
        return m_block_idx * smaller() + min(m_block_idx, num_larger());
    }
    __device__ uint32_t num_pool_blocks(uint32_t m_block_idx) const {
        if constexpr (!has_mixed_tiles<Config>) return 1;
        return smaller() + (m_block_idx < num_larger() ? 1 : 0);
    }

    // The m-block of one of the expert's tokens.
    __device__ uint32_t m_block_of(uint32_t token_idx) const {
        const uint32_t pool_block_idx = token_idx / step;
        if constexpr (!has_mixed_tiles<Config>) return pool_block_idx;
        const uint32_t end_of_larger = num_larger() * (smaller() + 1);
        return pool_block_idx < end_of_larger
                   ? pool_block_idx / (smaller() + 1)
                   : num_larger() + (pool_block_idx - end_of_larger) / smaller();
    }

 private:
    // num_larger() m-blocks have smaller() + 1 pool blocks, the others smaller().
    __device__ uint32_t smaller() const { return num_pool_blocks_ / num_m_blocks(); }
    __device__ uint32_t num_larger() const { return num_pool_blocks_ % num_m_blocks(); }

    uint32_t num_pool_blocks_;
};

}  // namespace deep_moe
