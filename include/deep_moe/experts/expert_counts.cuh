// How many tokens each local expert has: what every rank tells the owner of an expert, for shared
// ones the rank's own number; or what the caller says, whose tokens are here. The list of blocks,
// the pool and the work of dispatch follow from it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/expert_order.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/local_rows.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/grid_gather.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// An entry of the list of experts (expert_order.cuh), and its first pool block.
struct ExpertPlace {
    uint32_t expert_idx = 0;
    uint32_t pool_block_idx = 0;
};

// Of one warp, whose lanes share out the counts. All 32 of them call everything, and but for
// for_each_kept_count get the same answers.
template <class Config>
class ExpertCounts : public ExpertOrder<Config> {
    using Order = ExpertOrder<Config>;
    static constexpr uint32_t num_experts = Order::num_entries;
    static constexpr uint32_t num_experts_per_lane = ceil_div(num_experts, warp_size);
    // On SM100 a fence over all ranks takes longer than a trip to L2, which counts in calls of few
    // tokens. Loads that acquire wait for one another, so a lane should have few of them.
    static constexpr bool has_few_tokens =
        requires { Config::num_tmem_stages; } && Config::block_m <= 32;
    static constexpr bool acquires_by_loads =
        has_few_tokens && !Config::Tokens::are_here && num_experts_per_lane <= 2;

 public:
    // First of all: keeps what shared experts have, which no other rank has a part in. Routed ones
    // have nothing as yet.
    __device__ void count_shared(const KernelArgs& args) {
        if constexpr (Order::has_shared) {
            this->set_call(args);
#pragma unroll
            for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
                const uint32_t entry = i * warp_size + ptx::lane_idx();
                if (entry < num_experts && Order::is_shared(entry)) {
                    num_tokens_[i] = this->num_part_tokens(entry);
                }
            }
        }
    }

    // Waits until every active rank has published its counts, and keeps them in registers. False
    // once the rank has given up, and, before anything is written, if the tokens do not fit into
    // the pool. In a call without other ranks there is no wait, and the counts are those in `args`.
    // acquires: what every rank wrote before, too, happens before what any lane does afterwards.
    template <bool acquires = false>
    __device__ bool fetch(const KernelArgs& args, const SymmBuffer<Config>& local, Waiter& waiter);

    // The same for a warp that needs more than the numbers. What every rank wrote before it
    // published, its inputs too, happens before what any lane does afterwards.
    __device__ bool acquire(const KernelArgs& args, const SymmBuffer<Config>& local,
                            Waiter& waiter) {
        if constexpr (acquires_by_loads) return fetch<true>(args, local, waiter);
        const bool arrived = fetch(args, local, waiter);
        // Each lane has read the sums of its own experts only, with relaxed loads.
        ptx::fence_acquire_sys();  //~ counts_fence
        __syncwarp();
        return arrived;
    }

    // Of any entry of the list, an expert or a part of one.
    __device__ uint32_t num_tokens(uint32_t entry) const;
    // Whether the weights of a local expert, routed or shared, are copied once: one m-block needs
    // them, or those that a cluster has at once.
    __device__ bool copies_weights_once(uint32_t weight_expert_idx) const {
        if constexpr (Order::has_shared) {
            if (weight_expert_idx >= Config::num_experts_per_rank) return this->is_one_m_block();
        }
        const uint32_t entry = Order::entry_of(weight_expert_idx);
        return ceil_div(ExpertTiles<Config>(num_tokens(entry)).num_m_blocks(),
                        Config::num_cluster_m_blocks) == 1;
    }
    // Of all routed experts here.
    __device__ uint32_t num_received_tokens() const;
    // Of shared ones, too.
    __device__ uint32_t num_m_blocks_in_use() const;
    __device__ uint32_t num_pool_blocks_in_use() const;
    // Pool blocks whose rows others use after them.
    __device__ uint32_t num_reused_blocks() const {
        const uint32_t num_blocks = num_pool_blocks_in_use();
        return num_blocks - min(num_blocks, PoolRing<Config>::num_blocks);
    }
    // Whether the counts differ by clearly more than chance makes them.
    __device__ bool is_uneven(uint32_t num_received_tokens) const;

    // Calls visit(expert_idx, num_tokens) for the routed experts whose counts this lane keeps.
    template <class Visit>
    __device__ void for_each_kept_count(const Visit& visit) const {
#pragma unroll
        for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
            const uint32_t entry = i * warp_size + ptx::lane_idx();
            if (entry < num_experts && !Order::is_shared(entry)) {
                visit(Order::routed_expert(entry), num_tokens_[i]);
            }
        }
    }

    // Goes from expert to expert, as long as `offset` is not smaller than an expert's amount, which
    // it then takes off. True if the place that this leads to is in front of expert `end`.
    // `amount_of(tiles, num_tokens)`: of an expert, 0 if it has no tokens.
    template <class AmountOf>
    __device__ bool pass_experts(ExpertPlace& place, uint32_t end, uint32_t& offset,
                                 const AmountOf& amount_of) const;

 private:
    __device__ bool read_given(const KernelArgs& args, const SymmBuffer<Config>& local,
                               Waiter& waiter);

    // num_tokens_[idx], for an index that is not known when compiling.
    __device__ uint32_t kept_count(uint32_t idx) const;

    // Those of `active` that have not published a count for a local expert. Any thread.
    __device__ static RankSet silent_ranks(const SymmBuffer<Config>& local,
                                           const CallRanks<Config>& active,
                                           uint32_t local_expert_idx) {
        RankSet ranks;
#pragma unroll 1  // once per call at most; unrolled, it costs registers
        for (uint32_t rank_idx = 0; rank_idx < Config::num_ranks; ++rank_idx) {
            if constexpr (Config::masks_ranks) {
                if (!active.contains(rank_idx)) continue;
            }
            if (ptx::ld_relaxed_sys(local.expert_recv_count(rank_idx, local_expert_idx)) == 0) {
                ranks.insert(rank_idx);
            }
        }
        return ranks;
    }

    uint32_t num_tokens_[num_experts_per_lane] = {};  // [i] of lane l: entry 32 * i + l
};

template <class Config>
template <bool acquires>
__device__ bool ExpertCounts<Config>::fetch(const KernelArgs& args, const SymmBuffer<Config>& local,
                                            Waiter& waiter) {
    if constexpr (Config::Tokens::are_here) {
        if (!read_given(args, local, waiter)) return false;
    } else {
        const CallRanks<Config> active(args.masked_ranks);
        const uint32_t num_reports = Config::num_sms * active.count();
        const auto load_sum = [&](uint32_t expert_idx) {
            const uint64_t* sum = local.expert_recv_sum(expert_idx);
            //~ counts_loaded
            return acquires ? ptx::ld_acquire_sys(sum) : ptx::ld_relaxed_sys(sum);
        };

        // Some warps of every CTA wait here. Each polls one word only, by one lane, and not all
        // CTAs the same one, so that the peers' additions to these words need not queue behind
        // hundreds of polls for all of them.
        const uint32_t sample_idx =
            blockIdx.x / Config::cluster_size % Config::num_experts_per_rank;
        if (!waiter.warp_until(
                WaitSite::expert_counts, num_reports, [&] { return load_sum(sample_idx) >> 32; },
                [&] { return silent_ranks(local, active, sample_idx); })) {
            return false;
        }

        // The other experts' are there too, or on their way. Their loads are under way together.
        uint64_t sums[num_experts_per_lane];
#pragma unroll
        for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
            const uint32_t entry = i * warp_size + ptx::lane_idx();
            sums[i] = entry < num_experts && !Order::is_shared(entry)
                          ? load_sum(Order::routed_expert(entry))
                          : uint64_t{num_reports} << 32 | num_tokens_[i];
        }
        bool arrived = true;
#pragma unroll
        for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
            if (sums[i] >> 32 != num_reports) {
                const uint32_t expert_idx = Order::routed_expert(i * warp_size + ptx::lane_idx());
                const auto poll = [&] {
                    sums[i] = load_sum(expert_idx);
                    return sums[i] >> 32;
                };
                arrived &= waiter.until(WaitSite::expert_counts, num_reports, poll,
                                        [&] { return silent_ranks(local, active, expert_idx); });
            }
            num_tokens_[i] = static_cast<uint32_t>(sums[i]);  //~ kept_count
        }
        if (!waiter.warp_agrees(arrived)) return false;
    }
    if constexpr (PoolRing<Config>::wraps) return true;
    // All warps of the rank see the same counts, so all of them stop here together.
    const uint32_t num_pool_tokens = num_pool_blocks_in_use() * Config::block_m_step;
    const bool fits = num_pool_tokens <= Config::num_pool_tokens;
    if (!fits && ptx::lane_idx() == 0) {
        waiter.fail(WaitCode::pool_overflow, WaitSite::expert_counts, Config::num_pool_tokens,
                    num_pool_tokens);
    }
    return waiter.warp_agrees(fits);
}

// They were written before the kernel started. Counts that would lead out of the caller's rows, or
// out of the pool's counters, stop the rank; so does an earlier call that did, whose counters
// nobody has cleaned.
template <class Config>
__device__ bool ExpertCounts<Config>::read_given(const KernelArgs& args,
                                                 const SymmBuffer<Config>& local, Waiter& waiter) {
    constexpr uint32_t max_rows = Config::num_max_tokens_per_rank;
    bool lies_inside = true;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
        const uint32_t expert_idx = i * warp_size + ptx::lane_idx();
        if (expert_idx >= num_experts) continue;
        const LocalRowRange rows(args, expert_idx);
        num_tokens_[i] = min(rows.count, max_rows + 1);  // so that the sum does not overflow
        if (rows.is_inside(args)) continue;              //~ rows_inside
        waiter.fail(WaitCode::rows_outside, WaitSite::none, rows.count, expert_idx);
        lies_inside = false;
    }
    if (!waiter.warp_agrees(lies_inside && !has_given_up(local.grid_gather_counter())))
        return false;
    const uint32_t num_rows = num_received_tokens();
    if (num_rows > max_rows && ptx::lane_idx() == 0) {
        waiter.fail(WaitCode::too_many_rows, WaitSite::none, max_rows, num_rows);
    }
    return waiter.warp_agrees(num_rows <= max_rows);
}

template <class Config>
template <class AmountOf>
__device__ bool ExpertCounts<Config>::pass_experts(ExpertPlace& place, uint32_t end,
                                                   uint32_t& offset,
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
__device__ uint32_t ExpertCounts<Config>::num_tokens(uint32_t entry) const {
    return __shfl_sync(full_warp, kept_count(entry / warp_size), entry % warp_size);
}

template <class Config>
__device__ uint32_t ExpertCounts<Config>::kept_count(uint32_t idx) const {
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
__device__ uint32_t ExpertCounts<Config>::num_received_tokens() const {
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) mine += num_tokens_[i];
    return ptx::redux_sync_add(mine) - this->num_shared_tokens();
}

// Of a Poisson count the mean deviation is 0.8 times the root of its mean. It is compared with that
// of counts whose means vary by a fifth from expert to expert besides. With few experts, or few
// tokens, chance alone may look like it.
template <class Config>
__device__ bool ExpertCounts<Config>::is_uneven(uint32_t num_received_tokens) const {
    constexpr float variation = 0.2f;
    constexpr uint32_t least = 16;
    constexpr uint32_t num_routed = Config::num_experts_per_rank;
    const uint32_t mean = num_received_tokens / num_routed;
    if (num_routed < least || mean < least) return false;
    uint32_t mine = 0;
    for_each_kept_count([&](uint32_t, uint32_t num_tokens) {
        mine += num_tokens > mean ? num_tokens - mean : mean - num_tokens;
    });
    const float deviation = static_cast<float>(ptx::redux_sync_add(mine)) / num_routed;
    const float of_mean = static_cast<float>(mean);
    return deviation * deviation > 0.64f * of_mean * (1.0f + variation * variation * of_mean);
}

template <class Config>
__device__ uint32_t ExpertCounts<Config>::num_m_blocks_in_use() const {
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
        mine += ExpertTiles<Config>(num_tokens_[i]).num_m_blocks();
    }
    return ptx::redux_sync_add(mine);
}

template <class Config>
__device__ uint32_t ExpertCounts<Config>::num_pool_blocks_in_use() const {
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < num_experts_per_lane; ++i) {
        mine += ExpertTiles<Config>(num_tokens_[i]).num_pool_blocks();
    }
    return ptx::redux_sync_add(mine);
}

}  // namespace deep_moe
