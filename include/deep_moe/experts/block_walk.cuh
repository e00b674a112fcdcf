// The order of blocks. The list of all blocks follows from the experts' token counts alone, so
// every role that walks it knows every entry without communication.
//
// The blocks of each layer stand in the list by expert, by unit of up to num_unit_m_blocks of its
// m-blocks, by pair of neighbouring n-blocks, by m-block. So blocks of a unit that have the same
// weights begin together, and L2 holds these weights. The list begins with Linear1 of
// num_lead_m_blocks m-blocks. Then Linear2 and Linear1 alternate in turns of num_turn_m_blocks,
// each going on where it stopped. After the last of Linear1 comes all that is left of Linear2. The
// rows of Linear2 go to other ranks. With short turns they leave at a steady rate over the whole
// call. With long turns weights are read layer by layer.
//
// A cluster takes a pair of blocks, and its CTA of rank r takes the pair's r-th block. A pair is
// two neighbouring n-blocks of an m-block. Where num_cluster_m_blocks is 2, it is the same n-block
// of two neighbouring m-blocks, and two n-blocks only of an odd last m-block. A cluster claims the
// pair that it takes next (experts/block_claims.cuh). A block waits only for blocks in pairs in
// front of it, or for tokens that wait only for such blocks. Pairs are claimed in order, so the
// walk cannot deadlock.
//
// An m-block counts as half as many pairs as it has n-blocks, rounded up. A turn has as many pairs
// as its m-blocks, wherever units end. With an odd number of n-blocks there are blocks with
// n_block_idx == number of n-blocks: a CTA takes part in their loads and MMAs, and stores none of
// the results.
//
// If the pool is a ring (layout/pool_ring.cuh), Linear1 is ahead by so few m-blocks that Linear2 of
// every m-block that used a row before comes, in the list, before Linear1 of the m-block that uses
// it next.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/expert_order.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe {

// One warp has a walk. All 32 lanes call every method, and all members are the same in all lanes.
template <class Config>
class BlockWalk {
    using Order = ExpertOrder<Config>;
    template <Phase phase>
    static constexpr uint32_t num_pairs = LinearOf<Config>::template num_pairs<phase>;
    static constexpr uint32_t lead = Config::num_lead_m_blocks;
    static constexpr uint32_t turn = Config::num_turn_m_blocks;
    static_assert(Config::num_sms % Config::cluster_size == 0);
    // Of a unit, the last m-block's Linear1 begins so many m-blocks earlier than by itself, and the
    // first one's Linear2 ends so many later.
    static constexpr uint32_t unit = Config::num_unit_m_blocks;
    static_assert(turn > 0 && unit > 0 && lead >= turn + unit - 1,
                  "Linear1 is in front of its Linear2");
    static_assert(!PoolRing<Config>::wraps ||
                      (lead + 2 * (unit - 1)) * (Config::block_m / Config::block_m_step) <=
                          PoolRing<Config>::num_blocks,
                  "the m-blocks that Linear1 is ahead fit into the ring");
    // In the smallest rings a cluster does not take two m-blocks together.
    static constexpr bool takes_two = Config::num_cluster_m_blocks == 2 && unit > 1;
    static_assert(!takes_two || (Config::cluster_size == 2 && unit % 2 == 0));

 public:
    // `counts`: fetched. The walk has a copy, in the same registers.
    __device__ BlockWalk(const ExpertCounts<Config>& counts, uint32_t cta_idx)
        : counts_(counts),
          cta_rank_(cta_idx % Config::cluster_size),
          next_pair_(cta_idx / Config::cluster_size),
          num_m_blocks_(counts.num_m_blocks_in_use()) {
        if constexpr (PoolRing<Config>::wraps && is_mixed) {
            num_reused_ = counts.num_reused_blocks();
        }
    }

    // The block of the pair that the walk stands at; at first, that of the CTA's (cluster's) own
    // index. False behind the end of the list.
    __device__ bool find(Block& block);
    // Behind it only.
    __device__ void go_to(uint32_t pair_idx) { next_pair_ = pair_idx; }

 private:
    // Where m-blocks have one size, each is one pool block, and what is kept of mixed ones follows
    // from the number of pool blocks in front of the expert: the loaders have few registers.
    static constexpr bool is_mixed = Config::block_m != Config::block_m_step;

    // An expert, and how many m-blocks are in front of its first.
    struct Place : ExpertPlace {
        uint32_t kept_m_block_idx = 0;  // where they are of mixed sizes
        __device__ uint32_t m_block_idx() const {
            if constexpr (is_mixed) return kept_m_block_idx;
            return this->pool_block_idx;
        }
    };

    // The phase of the pair that the walk stands at; `pair_idx`: which of all of this phase it is.
    __device__ Phase find_phase(uint32_t& pair_idx) const;
    // Which pool blocks' rows others use after them: all in front of this one.
    __device__ uint32_t num_reused() const {
        if constexpr (!PoolRing<Config>::wraps) return 0;
        if constexpr (is_mixed) return num_reused_;
        constexpr uint32_t num_places = PoolRing<Config>::num_blocks;
        return num_m_blocks_ - min(num_m_blocks_, num_places);
    }

    ExpertCounts<Config> counts_;
    uint32_t cta_rank_;
    uint32_t next_pair_;       // in the list
    uint32_t num_m_blocks_;    // of all experts
    uint32_t num_reused_ = 0;  // where sizes are mixed

    Place place_;  // of the block that was found last
};

template <class Config>
__device__ Phase BlockWalk<Config>::find_phase(uint32_t& pair_idx) const {
    constexpr uint32_t first_pairs = num_pairs<Phase::linear1>;
    constexpr uint32_t second_pairs = num_pairs<Phase::linear2>;
    const uint32_t num_first = min(lead, num_m_blocks_) * first_pairs;  //~ lead_pairs
    pair_idx = next_pair_;
    if (pair_idx < num_first) return Phase::linear1;
    // From here on by turns, as long as there is any of Linear1.
    pair_idx -= num_first;
    constexpr uint32_t turn_pairs = turn * (first_pairs + second_pairs);
    const uint32_t turn_idx = pair_idx / turn_pairs;
    const uint32_t idx_in_turn = pair_idx - turn_idx * turn_pairs;
    const uint32_t num_left = num_m_blocks_ * first_pairs - num_first;
    // Pairs of Linear1 in front of this one.
    const bool is_second = idx_in_turn < turn * second_pairs;  //~ turn_of_linear2
    const uint32_t num_before =
        turn_idx * turn * first_pairs + (is_second ? 0 : idx_in_turn - turn * second_pairs);
    if (!is_second && num_before < num_left) {  //~ linear1_left
        pair_idx = num_first + num_before;
        return Phase::linear1;
    }
    pair_idx -= min(num_before, num_left);
    return Phase::linear2;
}

template <class Config>
__device__ bool BlockWalk<Config>::find(Block& block) {
    uint32_t pair_idx;
    const Phase phase = find_phase(pair_idx);
    const bool is_first = phase == Phase::linear1;
    const uint32_t m_block_idx =
        is_first ? pair_idx / num_pairs<Phase::linear1> : pair_idx / num_pairs<Phase::linear2>;
    if (m_block_idx >= num_m_blocks_) return false;
    if (m_block_idx < place_.m_block_idx()) place_ = {};
    const auto num_m_blocks_of = [](const ExpertTiles<Config>& tiles, uint32_t) {
        return tiles.num_m_blocks();
    };
    uint32_t idx_in_expert = m_block_idx - place_.m_block_idx();
    counts_.pass_experts(place_, Order::num_entries, idx_in_expert, num_m_blocks_of);
    place_.kept_m_block_idx = m_block_idx - idx_in_expert;

    const uint32_t num_pairs_of_one = LinearOf<Config>(phase).num_n_block_pairs();
    const uint32_t num_expert_tokens = counts_.num_tokens(place_.expert_idx);
    const ExpertTiles<Config> tiles(num_expert_tokens);
    const uint32_t idx_in_unit = idx_in_expert % unit;
    const uint32_t first = idx_in_expert - idx_in_unit;
    const uint32_t num_in_unit = min(unit, tiles.num_m_blocks() - first);  //~ unit_ends
    const uint32_t idx = pair_idx - (m_block_idx - idx_in_unit) * num_pairs_of_one;
    block.shares_weights = false;
    if constexpr (takes_two) {
        // An odd last m-block comes behind the others.
        const uint32_t num_twos = num_in_unit / 2;  //~ m_blocks_paired
        const uint32_t num_shared = num_twos * 2 * num_pairs_of_one;
        block.shares_weights = idx < num_shared;
        if (block.shares_weights) {
            block.n_block_idx = idx / num_twos;
            block.m_block_idx = first + 2 * (idx - block.n_block_idx * num_twos) + cta_rank_;
        } else {
            block.n_block_idx = (idx - num_shared) * 2 + cta_rank_;
            block.m_block_idx = first + num_in_unit - 1;
        }
    } else {
        const uint32_t n_pair_idx = unit == 1 ? idx : idx / num_in_unit;
        block.n_block_idx = n_pair_idx * Config::cluster_size + cta_rank_;
        block.m_block_idx = first + idx - n_pair_idx * num_in_unit;
    }
    block.phase = phase;
    block.expert_idx = Order::weight_expert(place_.expert_idx);
    const uint32_t first_pool_block = tiles.first_pool_block(block.m_block_idx);
    block.pool_block_idx = place_.pool_block_idx + first_pool_block;
    block.num_rows = tiles.num_pool_blocks(block.m_block_idx) * Config::block_m_step;
    //~ valid_rows
    block.num_valid_rows =
        min(num_expert_tokens - first_pool_block * Config::block_m_step, block.num_rows);
    block.is_reused = block.pool_block_idx < num_reused();
    return true;
}

}  // namespace deep_moe
