// The tiles of y, and which of them a CTA computes: every gridDim.x-th, expert by expert. Within an
// expert neighbouring tiles have the same columns, so that CTAs which run at once share weights in
// the L2 cache.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/products/args.cuh"

namespace deep_moe {

struct ProductTile {
    uint32_t expert;
    uint32_t first_row;
    uint32_t end_row;  // behind the expert's last row, so perhaps far behind the tile
    uint32_t n_block;
};

// Every role walks by itself; counts come from the cache.
template <class Config>
class ProductTiles {
 public:
    __device__ explicit ProductTiles(const GroupedProductArgs& args)
        : args_(args), num_n_blocks_(ceil_div(args.num_columns, Config::block_n)) {}

    // False behind the last one.
    __device__ __forceinline__ bool next(ProductTile& tile) {
        for (; expert_ < args_.num_experts; ++expert_) {
            const Rows rows = rows_of(expert_);
            const uint32_t num_m_blocks = ceil_div(rows.end - rows.begin, Config::block_m);
            const uint32_t num_tiles = num_m_blocks * num_n_blocks_;
            if (tile_idx_ - first_tile_ < num_tiles) {
                const uint32_t idx = tile_idx_ - first_tile_;
                tile = {expert_, rows.begin + idx % num_m_blocks * Config::block_m, rows.end,
                        idx / num_m_blocks};
                tile_idx_ += gridDim.x;
                return true;
            }
            first_tile_ += num_tiles;
        }
        return false;
    }

 private:
    struct Rows {
        uint32_t begin;
        uint32_t end;
    };

    __device__ __forceinline__ Rows rows_of(uint32_t expert) const {
        const int64_t num_rows = args_.num_rows;
        int64_t begin = int64_t{expert} * args_.rows_per_expert;
        int64_t limit = num_rows;
        if (args_.expert_begin != nullptr) {
            begin = args_.expert_begin[expert];
        } else {
            limit = min(num_rows, begin + args_.rows_per_expert);  //~ rows_of_own_expert
        }
        const int64_t end = begin + args_.expert_count[expert];
        begin = min(max(begin, int64_t{0}), limit);
        return {static_cast<uint32_t>(begin),
                static_cast<uint32_t>(max(min(end, limit), begin))};  //~ rows_bounded
    }

    const GroupedProductArgs& args_;
    uint32_t num_n_blocks_;
    uint32_t tile_idx_ = blockIdx.x;
    uint32_t expert_ = 0;
    uint32_t first_tile_ = 0;  // of expert_
};

}  // namespace deep_moe
