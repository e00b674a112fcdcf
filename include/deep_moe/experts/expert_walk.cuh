// The list of blocks where every pool block has rows of its own (block_walk.cuh).
//
// First the Linear1 blocks of a wave of num_experts_per_wave experts, from then on by
// turns the Linear2 blocks of num_experts_per_turn experts and the Linear1 blocks of as many, a
// wave further; inside, by expert, by m-block, by pair of neighbouring n-blocks. With a whole wave
// per turn that is wave by wave, first Linear1, then Linear2. With less, Linear1 stays ahead, and
// Linear2, which may fill the links to other ranks, is spread over the call.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/expert_order.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe {

// Of one warp; all 32 lanes call everything, and all members are the same in all of them.
template <class Config>
class ExpertWalk {
 protected:
    using Order = ExpertOrder<Config>;
    static constexpr uint32_t num_experts = Order::num_entries;
    // Entries of the list: a wave has the parts of shared experts that stand among its routed ones,
    // a shorter turn is of one or the other.
    static constexpr uint32_t num_experts_per_wave =
        Order::num_entries_with(Config::num_experts_per_wave);
    static constexpr uint32_t num_experts_per_turn =
        Config::num_experts_per_turn == Config::num_experts_per_wave ? num_experts_per_wave
                                                                     : Config::num_experts_per_turn;
    static constexpr uint32_t num_clusters = Config::num_sms / Config::cluster_size;
    static_assert(Config::num_sms % Config::cluster_size == 0);

 public:
    // `counts`: fetched. The walk has a copy, in the same registers.
    __device__ ExpertWalk(const ExpertCounts<Config>& counts, uint32_t cta_idx)
        : counts_(counts),
          cta_rank_(cta_idx % Config::cluster_size),
          next_pair_(cta_idx / Config::cluster_size) {}

    // The block of the pair that the walk stands at, the CTA's (cluster's) own index at first.
    // False when that is behind the list.
    __device__ bool find(Block& block) { return find_in_run(block, 0, ~0u); }
    // Go on by so many pairs.
    __device__ void advance(uint32_t num_pairs) { next_pair_ += num_pairs; }
    // Block by block, where a cluster takes every (number of clusters)-th pair.
    __device__ bool next(Block& block) {
        const bool found = find(block);
        advance(num_clusters);
        return found;
    }

 protected:
    // The same, if next_pair_ counts from m-block `first` of the expert that the walk is at, and
    // its m-blocks from `end` on are none for a cluster to have together with one before.
    __device__ bool find_in_run(Block& block, uint32_t first, uint32_t end);
    // The other phase's turn; false if there is none.
    __device__ bool start_next_turn();

    ExpertCounts<Config> counts_;
    uint32_t cta_rank_;

    // The walk stands at an expert of one phase, whose turn ends at turn_end_; then it goes on
    // where the other phase was left.
    Phase phase_ = Phase::linear1;
    ExpertPlace place_;
    uint32_t turn_end_ = min(num_experts_per_wave, num_experts);
    ExpertPlace other_place_;
    uint32_t next_pair_;  // to be found, counted from the expert's first in this phase
};

template <class Config>
__device__ bool ExpertWalk<Config>::find_in_run(Block& block, uint32_t first, uint32_t end) {
    const auto num_pairs_of = [&](const ExpertTiles<Config>& tiles, uint32_t) {
        return tiles.num_m_blocks() * LinearOf<Config>(phase_).num_n_block_pairs();
    };
    while (!counts_.pass_experts(place_, turn_end_, next_pair_, num_pairs_of)) {
        if (!start_next_turn()) return false;
    }
    const uint32_t num_expert_tokens = counts_.num_tokens(place_.expert_idx);
    const ExpertTiles<Config> tiles(num_expert_tokens);
    const uint32_t num_pairs = LinearOf<Config>(phase_).num_n_block_pairs();
    uint32_t m_block_idx, n_block_idx;
    block.shares_weights = false;
    if constexpr (Config::num_cluster_m_blocks == 1) {
        m_block_idx = next_pair_ / num_pairs;
        n_block_idx = next_pair_ % num_pairs * Config::cluster_size + cta_rank_;
    } else {
        static_assert(Config::num_cluster_m_blocks == 2 && Config::cluster_size == 2);
        const uint32_t two_idx = next_pair_ / (2 * num_pairs);
        const uint32_t idx_in_two = next_pair_ - two_idx * 2 * num_pairs;
        m_block_idx = first + 2 * two_idx;
        //~ m_blocks_paired
        block.shares_weights = m_block_idx + 1 < min(end, tiles.num_m_blocks());
        m_block_idx += block.shares_weights ? cta_rank_ : 0;
        n_block_idx = block.shares_weights ? idx_in_two : 2 * idx_in_two + cta_rank_;
    }
    block.phase = phase_;
    block.expert_idx = Order::weight_expert(place_.expert_idx);
    block.m_block_idx = m_block_idx;
    block.n_block_idx = n_block_idx;
    const uint32_t first_pool_block = tiles.first_pool_block(m_block_idx);
    block.pool_block_idx = place_.pool_block_idx + first_pool_block;
    block.num_rows = tiles.num_pool_blocks(m_block_idx) * Config::block_m_step;
    //~ valid_rows
    block.num_valid_rows =
        min(num_expert_tokens - first_pool_block * Config::block_m_step, block.num_rows);
    block.is_reused = false;
    return true;
}

template <class Config>
__device__ bool ExpertWalk<Config>::start_next_turn() {
    const bool is_over = place_.expert_idx == num_experts;
    if (phase_ == Phase::linear2 && is_over) return false;
    phase_ = phase_ == Phase::linear1 ? Phase::linear2 : Phase::linear1;
    const ExpertPlace place = place_;
    place_ = other_place_;
    other_place_ = place;
    // Behind the last of Linear1 all that is left of Linear2 comes in one turn.
    turn_end_ = is_over ? num_experts : min(place_.expert_idx + num_experts_per_turn, num_experts);
    return true;
}

}  // namespace deep_moe
