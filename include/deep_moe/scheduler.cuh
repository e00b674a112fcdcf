// Which block comes next. A scheduler walks the list of all blocks, which follows from the experts'
// token counts alone, so that whoever owns one knows what stands where without asking anybody.
//
// The list: first the Linear1 blocks of a wave of num_experts_per_wave experts, from then on by
// turns the Linear2 blocks of num_experts_per_turn experts and the Linear1 blocks of as many, a
// wave further; inside, by expert, by m-block, by pair of neighbouring n-blocks. With a whole wave
// per turn that is wave by wave, first Linear1, then Linear2. With less, Linear1 stays ahead, and
// Linear2, which may fill the links to other ranks, is spread over the call.
//
// A cluster takes a pair, its CTA of rank r the pair's r-th n-block. Which pairs: on SM100 every
// (number of clusters)-th, on SM90 whichever it claims next (sm90/block_claims.cuh). A block waits
// only for blocks in front of it, and pairs are taken in order, so the walk cannot deadlock.
//
// With an odd number of n-blocks the last pair's second CTA gets n_block_idx == number of n-blocks:
// it takes part in loads and MMAs, whose results nobody stores.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

enum class Phase : uint32_t { linear1, linear2 };

// The tokens of a block.
struct BlockRows {
    Phase phase;
    uint32_t pool_block_idx;  // the m-block's first; its counters are those of the m-block
    uint32_t num_rows;        // of the m-block, up to block_m
    uint32_t num_valid_rows;  // tokens in it, at least 1
};

struct Block : BlockRows {
    uint32_t expert_idx;  // local
    uint32_t m_block_idx;
    uint32_t n_block_idx;
};

// A local expert, and its first pool block.
struct ExpertPlace {
    uint32_t expert_idx = 0;
    uint32_t pool_block_idx = 0;
};

// All members are warp-uniform, but for the counts, which the lanes share out. All 32 lanes call.
template <class Config>
class Scheduler {
    static constexpr uint32_t num_experts = Config::num_experts_per_rank;
    static constexpr uint32_t num_experts_per_lane = ceil_div(num_experts, warp_size);
    static constexpr uint32_t num_clusters = Config::num_sms / Config::cluster_size;
    static_assert(Config::num_sms % Config::cluster_size == 0);

 public:
    __device__ Scheduler(const SymmBuffer<Config>& local, uint32_t cta_idx)
        : local_(local),
          cta_rank_(cta_idx % Config::cluster_size),
          next_pair_(cta_idx / Config::cluster_size) {}

    // Waits until every rank has published its counts, and keeps them in registers. False once the
    // rank has given up; also, before anything is written, if the tokens do not fit into the pool.
    __device__ bool fetch_expert_counts(Waiter& waiter);

    // The same for who needs more than the numbers: what every rank wrote before it published, its
    // inputs too, happens before what any lane does after.
    __device__ bool acquire_expert_counts(Waiter& waiter) {
        const bool arrived = fetch_expert_counts(waiter);
        // Each lane has read the sums of its own experts only, with relaxed loads.
        ptx::fence_acquire_sys();
        __syncwarp();
        return arrived;
    }

    // The block of the pair that the walk stands at, the CTA's (cluster's) own index at first.
    // False when that is behind the list.
    __device__ bool find(Block& block);
    // Go on by so many pairs.
    __device__ void advance(uint32_t num_pairs) { next_pair_ += num_pairs; }
    // Block by block, where a cluster takes every (number of clusters)-th pair.
    __device__ bool next(Block& block) {
        const bool found = find(block);
        advance(num_clusters);
        return found;
    }

    // Goes from expert to expert, as long as `offset` is not smaller than an expert's amount, which
    // it then takes off. True if the place that this leads to is in front of expert `end`.
    // `amount_of(tiles, num_tokens)`: of an expert, 0 if it has no tokens.
    template <class AmountOf>
    __device__ bool pass_experts(ExpertPlace& place, uint32_t end, uint32_t& offset,
                                 const AmountOf& amount_of) const;

    // Any local expert.
    __device__ uint32_t num_tokens(uint32_t local_expert_idx) const;
    __device__ uint32_t num_m_blocks(uint32_t local_expert_idx) const {
        return ExpertTiles<Config>(num_tokens(local_expert_idx)).num_m_blocks();
    }
    // Calls visit(expert_idx, num_tokens) for the experts whose counts this lane keeps.
    template <class Visit>
    __device__ void for_each_kept_count(const Visit& visit) const {
#pragma unroll
        for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
            const uint32_t expert_idx = i * warp_size + ptx::lane_idx();
            if (expert_idx < num_experts) visit(expert_idx, num_tokens_[i]);
        }
    }
    // Of all local experts.
    __device__ uint32_t num_received_tokens() const;
    // Whether their counts differ by clearly more than chance makes them. All lanes.
    __device__ bool is_uneven(uint32_t num_received_tokens) const;
    __device__ uint32_t num_pool_blocks_in_use() const;

 private:
    // The other phase's turn; false if there is none.
    __device__ bool start_next_turn();
    // num_tokens_[idx], for an index that is not known when compiling.
    __device__ uint32_t kept_count(uint32_t idx) const;

    static __device__ uint32_t num_pairs_per_m_block(Phase phase) {
        return phase == Phase::linear1 ? ceil_div(Config::num_l1_n_blocks, Config::cluster_size)
                                       : ceil_div(Config::num_l2_n_blocks, Config::cluster_size);
    }

    // Who has not published a count for a local expert. Any thread.
    __device__ RankSet silent_ranks(uint32_t local_expert_idx) const {
        RankSet ranks;
#pragma unroll 1  // once per call at most; unrolled, it costs registers
        for (uint32_t rank_idx = 0; rank_idx < Config::num_ranks; ++rank_idx) {
            if (ptx::ld_relaxed_sys(local_.expert_recv_count(rank_idx, local_expert_idx)) == 0) {
                ranks.insert(rank_idx);
            }
        }
        return ranks;
    }

    SymmBuffer<Config> local_;
    uint32_t cta_rank_;
    uint32_t num_tokens_[num_experts_per_lane] = {};  // [i] of lane l: expert 32 * i + l

    // The walk stands at an expert of one phase, whose turn ends at turn_end_; then it goes on
    // where the other phase was left.
    Phase phase_ = Phase::linear1;
    ExpertPlace place_;
    uint32_t turn_end_ = min(Config::num_experts_per_wave, num_experts);
    ExpertPlace other_place_;
    uint32_t next_pair_;  // to be found, counted from the expert's first in this phase
};

template <class Config>
__device__ bool Scheduler<Config>::fetch_expert_counts(Waiter& waiter) {
    constexpr uint32_t num_reports = Config::num_sms * Config::num_ranks;
    const auto load_sum = [&](uint32_t expert_idx) {
        return ptx::ld_relaxed_sys(local_.expert_recv_sum(expert_idx));
    };

    // Some warps of every CTA wait here. Each polls one word only, by one lane, and not all CTAs
    // the same one, so that the peers' additions to these words need not queue behind hundreds of
    // polls for all of them.
    const uint32_t sample_idx = next_pair_ % num_experts;
    if (!waiter.warp_until(
            WaitSite::expert_counts, num_reports, [&] { return load_sum(sample_idx) >> 32; },
            [&] { return silent_ranks(sample_idx); })) {
        return false;
    }

    // The other experts' are there too, or on their way. Their loads are under way together.
    uint64_t sums[num_experts_per_lane];
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
        const uint32_t expert_idx = i * warp_size + ptx::lane_idx();
        sums[i] = expert_idx < num_experts ? load_sum(expert_idx) : uint64_t{num_reports} << 32;
    }
    bool arrived = true;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
        if (sums[i] >> 32 != num_reports) {
            const uint32_t expert_idx = i * warp_size + ptx::lane_idx();
            const auto poll = [&] {
                sums[i] = load_sum(expert_idx);
                return sums[i] >> 32;
            };
            arrived &= waiter.until(WaitSite::expert_counts, num_reports, poll,
                                    [&] { return silent_ranks(expert_idx); });
        }
        num_tokens_[i] = static_cast<uint32_t>(sums[i]);
    }
    if (!waiter.warp_agrees(arrived)) return false;

    // All warps of the rank see the same counts, so all of them stop here together.
    const uint32_t num_pool_tokens = num_pool_blocks_in_use() * Config::block_m_step;
    const bool fits = num_pool_tokens <= Config::num_max_pool_tokens;
    if (!fits && ptx::lane_idx() == 0) {
        waiter.fail(WaitCode::pool_overflow, WaitSite::expert_counts, Config::num_max_pool_tokens,
                    num_pool_tokens);
    }
    return waiter.warp_agrees(fits);
}

template <class Config>
__device__ bool Scheduler<Config>::find(Block& block) {
    const auto num_pairs_of = [&](const ExpertTiles<Config>& tiles, uint32_t) {
        return tiles.num_m_blocks() * num_pairs_per_m_block(phase_);
    };
    while (!pass_experts(place_, turn_end_, next_pair_, num_pairs_of)) {
        if (!start_next_turn()) return false;
    }
    const uint32_t num_expert_tokens = num_tokens(place_.expert_idx);
    const ExpertTiles<Config> tiles(num_expert_tokens);
    const uint32_t num_pairs = num_pairs_per_m_block(phase_);
    const uint32_t m_block_idx = next_pair_ / num_pairs;
    const uint32_t pair_idx = next_pair_ % num_pairs;
    block.phase = phase_;
    block.expert_idx = place_.expert_idx;
    block.m_block_idx = m_block_idx;
    block.n_block_idx = pair_idx * Config::cluster_size + cta_rank_;
    const uint32_t first_pool_block = tiles.first_pool_block(m_block_idx);
    block.pool_block_idx = place_.pool_block_idx + first_pool_block;
    block.num_rows = tiles.num_pool_blocks(m_block_idx) * Config::block_m_step;
    block.num_valid_rows =
        min(num_expert_tokens - first_pool_block * Config::block_m_step, block.num_rows);
    return true;
}

template <class Config>
__device__ bool Scheduler<Config>::start_next_turn() {
    const bool is_over = place_.expert_idx == num_experts;
    if (phase_ == Phase::linear2 && is_over) return false;
    phase_ = phase_ == Phase::linear1 ? Phase::linear2 : Phase::linear1;
    const ExpertPlace place = place_;
    place_ = other_place_;
    other_place_ = place;
    // Behind the last of Linear1 all that is left of Linear2 comes in one turn.
    turn_end_ =
        is_over ? num_experts : min(place_.expert_idx + Config::num_experts_per_turn, num_experts);
    return true;
}

template <class Config>
template <class AmountOf>
__device__ bool Scheduler<Config>::pass_experts(ExpertPlace& place, uint32_t end, uint32_t& offset,
                                                const AmountOf& amount_of) const {
    while (place.expert_idx < end) {
        // A single one by itself: a walk in turns of one expert takes 40 % fewer instructions so.
        if (place.expert_idx + 1 == end) {
            const uint32_t count = num_tokens(place.expert_idx);
            const ExpertTiles<Config> tiles(count);
            const uint32_t amount = amount_of(tiles, count);
            if (offset < amount) return true;
            offset -= amount;
            place.pool_block_idx += tiles.num_pool_blocks();
            place.expert_idx = end;
            break;
        }
        // Up to 32 at once: with few tokens most experts have none, and one after the other they
        // would take microseconds.
        const uint32_t first = place.expert_idx / warp_size * warp_size;
        const uint32_t expert_idx = first + ptx::lane_idx();
        const bool is_ahead = place.expert_idx <= expert_idx && expert_idx < end;
        const uint32_t count = is_ahead ? kept_count(first / warp_size) : 0;
        const ExpertTiles<Config> tiles(count);
        const uint32_t up_to_lane = ptx::inclusive_sum(amount_of(tiles, count));
        const uint32_t further = __ballot_sync(full_warp, offset < up_to_lane);
        // Lanes whose experts are passed: all, if the place is behind them.
        const uint32_t num_lanes = further == 0 ? warp_size : __ffs(further) - 1;
        place.pool_block_idx +=
            ptx::redux_sync_add(ptx::lane_idx() < num_lanes ? tiles.num_pool_blocks() : 0);
        const uint32_t passed = __shfl_sync(full_warp, up_to_lane, num_lanes - 1);
        offset -= num_lanes == 0 ? 0 : passed;
        place.expert_idx = min(first + num_lanes, end);
        if (further != 0) return true;
    }
    return false;
}

template <class Config>
__device__ uint32_t Scheduler<Config>::num_tokens(uint32_t local_expert_idx) const {
    return __shfl_sync(full_warp, kept_count(local_expert_idx / warp_size),
                       local_expert_idx % warp_size);
}

template <class Config>
__device__ uint32_t Scheduler<Config>::kept_count(uint32_t idx) const {
    // All elements are read, because reading one by index would move the array out of registers.
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
        const uint32_t count = num_tokens_[i];
        mine = idx == i ? count : mine;
    }
    return mine;
}

template <class Config>
__device__ uint32_t Scheduler<Config>::num_received_tokens() const {
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) mine += num_tokens_[i];
    return ptx::redux_sync_add(mine);
}

// Of a Poisson count the mean deviation is 0.8 times the root of its mean. It is compared with that
// of counts whose means vary by a fifth from expert to expert besides. With few experts, or few
// tokens, chance alone may look like it.
template <class Config>
__device__ bool Scheduler<Config>::is_uneven(uint32_t num_received_tokens) const {
    constexpr float variation = 0.2f;
    constexpr uint32_t least = 16;
    const uint32_t mean = num_received_tokens / num_experts;
    if (num_experts < least || mean < least) return false;
    uint32_t mine = 0;
    for_each_kept_count([&](uint32_t, uint32_t num_tokens) {
        mine += num_tokens > mean ? num_tokens - mean : mean - num_tokens;
    });
    const float deviation = static_cast<float>(ptx::redux_sync_add(mine)) / num_experts;
    const float of_mean = static_cast<float>(mean);
    return deviation * deviation > 0.64f * of_mean * (1.0f + variation * variation * of_mean);
}

template <class Config>
__device__ uint32_t Scheduler<Config>::num_pool_blocks_in_use() const {
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
        mine += ExpertTiles<Config>(num_tokens_[i]).num_pool_blocks();
    }
    return ptx::redux_sync_add(mine);
}

}  // namespace deep_moe
