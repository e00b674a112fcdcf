// The tiles of y, and which of them a CTA computes: those of every num_clusters-th turn of its
// cluster, expert by expert. Within an expert neighbouring turns have the same columns, so that
// CTAs which run at once share weights in the L2 cache.
//
// In a turn the two CTAs of a cluster have two m-blocks of an expert and the same columns, so they
// share copies of the weights. Behind the last pair an odd m-block may be left: then they have it
// both, with columns of their own.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/products/args.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/training/token_blocks.cuh"

namespace deep_moe {

struct ProductTile {
    uint32_t expert;
    uint32_t first_row;
    uint32_t num_rows;      // at least 1
    uint32_t first_column;  // behind the last one, where an odd m-block has an odd number of tiles
    bool shares_weights;    // with the other CTA of the cluster
    uint32_t first_k_block;
    uint32_t num_k_blocks;  // at least 1
};

// Every role walks by itself; counts come from the cache. Both CTAs of a cluster have as many
// tiles.
template <class Config>
class ProductTiles {
    static constexpr uint32_t cluster_size = Config::cluster_size;
    static_assert(cluster_size == 1 || cluster_size == 2);

 public:
    __device__ explicit ProductTiles(const GroupedProductArgs& args)
        : args_(args), num_n_blocks_(ceil_div(args.num_columns, Config::block_n)) {
        if constexpr (cluster_size > 1) rank_ = ptx::cluster_ctarank();
    }

    // False behind the last one.
    __device__ __forceinline__ bool next(ProductTile& tile) {
        for (; expert_ < args_.num_experts; ++expert_) {
            const Rows rows = rows_of(expert_);
            uint32_t num_k_blocks = args_.num_k_blocks;
            if constexpr (Config::sums_rows) {
                num_k_blocks = num_row_blocks_of(args_.expert_end, expert_);
            }
            const uint32_t num_rows = rows.end - rows.begin;
            if (num_rows == 0) continue;
            const uint32_t num_m_blocks = ceil_div(num_rows, Config::block_m);
            const uint32_t num_groups = num_m_blocks / cluster_size;
            const uint32_t num_grouped = num_groups * num_n_blocks_;
            uint32_t num_turns = num_grouped;
            if (num_m_blocks % cluster_size != 0)
                num_turns += ceil_div(num_n_blocks_, cluster_size);
            if (turn_ - first_turn_ < num_turns) {
                const uint32_t idx = turn_ - first_turn_;
                const bool is_grouped = idx < num_grouped;
                uint32_t m_block = num_m_blocks - 1;
                uint32_t n_block = (idx - num_grouped) * cluster_size + rank_;  //~ odd_block
                if (is_grouped) {
                    m_block = idx % num_groups * cluster_size + rank_;  //~ m_block_of_rank
                    n_block = idx / num_groups;
                }
                const uint32_t first_row = m_block * Config::block_m;
                tile = {expert_,
                        rows.begin + first_row,
                        min(Config::block_m, num_rows - first_row),
                        n_block * Config::block_n,
                        cluster_size > 1 && is_grouped,
                        first_k_block_,
                        num_k_blocks};
                turn_ += gridDim.x / cluster_size;
                return true;
            }
            first_turn_ += num_turns;
            if constexpr (Config::sums_rows) first_k_block_ += num_k_blocks;  //~ k_blocks_of_expert
        }
        return false;
    }

 private:
    struct Rows {
        uint32_t begin;
        uint32_t end;
    };

    __device__ __forceinline__ Rows rows_of(uint32_t expert) const {
        if constexpr (Config::sums_rows) return {0, args_.num_rows};
        const int64_t num_rows = args_.num_rows;
        int64_t begin = int64_t{expert} * args_.rows_per_expert;
        int64_t limit = num_rows;
        int64_t end;
        if (args_.expert_end != nullptr) {
            begin = expert == 0 ? 0 : args_.expert_end[expert - 1];  //~ end_of_expert_before
            end = args_.expert_end[expert];
        } else {
            if (args_.expert_begin != nullptr) {
                begin = args_.expert_begin[expert];
            } else {
                limit = min(num_rows, begin + args_.rows_per_expert);  //~ rows_of_own_expert
            }
            end = begin + args_.expert_count[expert];
        }
        begin = min(max(begin, int64_t{0}), limit);
        return {static_cast<uint32_t>(begin),
                static_cast<uint32_t>(max(min(end, limit), begin))};  //~ rows_bounded
    }

    const GroupedProductArgs& args_;
    uint32_t num_n_blocks_;
    uint32_t rank_ = 0;
    uint32_t turn_ = blockIdx.x / cluster_size;
    uint32_t expert_ = 0;
    uint32_t first_turn_ = 0;     // of expert_
    uint32_t first_k_block_ = 0;  // of expert_, where K are rows
};

}  // namespace deep_moe
