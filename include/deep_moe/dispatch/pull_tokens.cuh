// Dispatch: bring the tokens of this rank's experts into the L1 pool.
//
// All dispatch warps of the grid, but for those that publish, stride over the rank's tokens in pool
// order, one token per warp at a time: bulk copy into the warp's buffer, bulk copy out into the
// pool, then one more arrival on the token's pool block.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/list_pages.cuh"
#include "deep_moe/dispatch/min_peeling.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/expert_order.cuh"
#include "deep_moe/experts/release_rows.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/layout/token_places.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// Of the dispatch warps, the first. Others publish blocks meanwhile, where the target has such
// warps (experts/sm90/l1_publisher.cuh).
template <class Config>
inline constexpr uint32_t num_pull_warps = Config::num_dispatch_warps;
template <class Config>
    requires(Config::num_publish_warps > 0)
inline constexpr uint32_t num_pull_warps<Config> =
    Config::num_dispatch_warps - Config::num_publish_warps;

template <class Config>
__device__ __forceinline__ bool pulls_tokens(uint32_t warp_idx) {
    // A comparison that all warps pass would take a register while they pull.
    return num_pull_warps<Config> == Config::num_dispatch_warps ||
           warp_idx < num_pull_warps<Config>;
}

// One token on its way, for the architecture's policy.
//
// A policy has two members, called by all 32 lanes:
//   store_scales(local, source, token): while the token's bytes travel. Loads the scales from
//       `source`, a SymmBuffer or what LocalRows::of gives, and stores them to the pool of `local`,
//       with ordinary instructions.
//   rewrite_token(token, bytes): when they have arrived at shared address `bytes`, before they are
//       stored to the pool. They may be read and written as they are; every lane that did runs
//       fence.proxy.async.shared::cta afterwards.
struct PulledToken {
    uint32_t pool_block_idx;   // of its m-block, the first
    uint32_t num_pool_blocks;  // of its m-block
    uint32_t row_idx;          // in the m-block, 0..block_m - 1
    uint32_t pool_token_idx;   // the row of the pool
    TokenSource source;
};

// Where a token goes: the idx_in_expert-th of an entry of the list with these tiles, whose first
// pool block is known.
template <class Config>
__device__ __forceinline__ void set_destination(PulledToken& token, uint32_t pool_block_idx,
                                                const ExpertTiles<Config>& tiles,
                                                uint32_t idx_in_expert) {
    using Ring = PoolRing<Config>;
    const uint32_t m_block_idx = tiles.m_block_of(idx_in_expert);
    const uint32_t first_pool_block = tiles.first_pool_block(m_block_idx);
    token.pool_block_idx = pool_block_idx + first_pool_block;
    token.num_pool_blocks = tiles.num_pool_blocks(m_block_idx);
    token.row_idx = idx_in_expert - first_pool_block * Config::block_m_step;  //~ pull_row
    if constexpr (Ring::wraps) {
        token.pool_token_idx = Ring::first_row(token.pool_block_idx) + token.row_idx;
    } else {
        token.pool_token_idx = pool_block_idx * Config::block_m_step + idx_in_expert;
    }
}

// Tokens in pool order: expert by expert as in expert_order.cuh, each starting on a block. All
// members are uniform.
template <class Config>
class ExpertRuns {
 protected:
    using Order = ExpertOrder<Config>;

    __device__ ExpertRuns(const SymmBuffer<Config>& local, const ExpertCounts<Config>& counts)
        : local_(local), counts_(counts) {}

    // The expert of the token at `token_idx`, counted over all entries of the list, unless the walk
    // is there already; only upwards. False past the last token.
    __device__ bool enter_expert_of(uint32_t token_idx) {
        uint32_t idx_in_expert = token_idx - expert_begin_;
        const bool exists = counts_.pass_experts(
            place_, Order::num_entries, idx_in_expert,
            [](const ExpertTiles<Config>&, uint32_t num_tokens) { return num_tokens; });
        if (!exists) return false;
        expert_begin_ = token_idx - idx_in_expert;
        expert_end_ = expert_begin_ + counts_.num_tokens(place_.expert_idx);
        return true;
    }

    SymmBuffer<Config> local_;
    const ExpertCounts<Config>& counts_;
    ExpertPlace place_;
    uint32_t expert_begin_ = 0;  // tokens [begin, end) are those of the expert there
    uint32_t expert_end_ = 0;
};

// The tokens that ranks have sent. A shared expert's are the rank's own, in order; their slot is
// behind the routed ones. All members uniform but for the ranks' counts.
template <class Config>
class PoolWalk : ExpertRuns<Config> {
    static constexpr uint32_t num_ranks_per_lane = ceil_div(Config::num_ranks, warp_size);
    using Runs = ExpertRuns<Config>;
    using Runs::local_, Runs::counts_, Runs::expert_begin_, Runs::expert_end_, Runs::place_;
    using typename Runs::Order;

 public:
    __device__ PoolWalk(const RankBuffers<Config>& buffers, const ExpertCounts<Config>& counts)
        : Runs(buffers.local(), counts) {}

    // The token at `token_idx`, counted over all entries of the list; only upwards. False past the
    // last.
    __device__ bool find(uint32_t token_idx, PulledToken& token) {
        if (token_idx >= expert_end_ && !enter(token_idx)) return false;
        const uint32_t idx_in_expert = token_idx - expert_begin_;
        const ExpertTiles<Config> tiles(expert_end_ - expert_begin_);
        if constexpr (Order::has_shared) {
            if (Order::is_shared(place_.expert_idx)) {
                set_destination(token, place_.pool_block_idx, tiles, idx_in_expert);
                //~ shared_source
                token.source = {counts_.own_rank_idx(),
                                counts_.first_token(place_.expert_idx) + idx_in_expert,
                                Config::num_topk + Order::shared_expert(place_.expert_idx)};
                return true;
            }
        }
        const RankToken source = find_source_rank<Config::num_ranks>(num_tokens_, idx_in_expert);
        const uint32_t slot =
            *listed_slot<Config>(local_, Order::routed_expert(place_.expert_idx), source);
        // While the slot is on its way. In front of it, it would cost two registers more.
        set_destination(token, place_.pool_block_idx, tiles, idx_in_expert);
        //~ pull_source
        token.source = {source.rank_idx, slot / Config::num_topk, slot % Config::num_topk};
        return true;
    }

 private:
    __device__ bool enter(uint32_t token_idx) {
        if (!this->enter_expert_of(token_idx)) return false;
        if (!Order::is_shared(place_.expert_idx)) load_counts();
        return true;
    }

    __device__ void load_counts() {
#pragma unroll
        for (uint32_t i = 0; i < num_ranks_per_lane; ++i) {
            const uint32_t rank_idx = i * warp_size + ptx::lane_idx();
            num_tokens_[i] = 0;
            if (rank_idx < Config::num_ranks) {
                num_tokens_[i] = static_cast<uint32_t>(
                    *local_.expert_recv_count(rank_idx, Order::routed_expert(place_.expert_idx)));
            }
        }
    }

    uint32_t num_tokens_[num_ranks_per_lane];  // [i] of lane l: from rank 32 * i + l
};

// Where the pool is a ring: whether others have had rows of the token's m-block before it in this
// call.
template <class Config>
__device__ bool takes_used_rows(const PulledToken& token) {
    return token.pool_block_idx + token.num_pool_blocks > PoolRing<Config>::num_blocks;
}

// Waits until the blocks that had these rows before need them no longer. A whole warp, whose
// ordinary stores may then write them; false after an abort.
//
// It waits for the whole m-block, because no token waits for the padding. So every thread that used
// a row in any earlier round is done with it. All those blocks come before Linear1 of this m-block
// in the list (block_walk.cuh), so they finish without it.
template <class Config>
__device__ bool await_rows(const SymmBuffer<Config>& local, const PulledToken& token,
                           Waiter& waiter) {
    const uint32_t lane_block_idx = token.pool_block_idx + ptx::lane_idx();
    bool released = true;
    if (ptx::lane_idx() < token.num_pool_blocks && lane_block_idx >= PoolRing<Config>::num_blocks) {
        const uint32_t* count = local.release_count(lane_block_idx - PoolRing<Config>::num_blocks);
        released = waiter.until(WaitSite::rows_released, num_releases<Config>,
                                [&] { return ptx::ld_acquire_gpu(count); });
    }
    return waiter.warp_agrees(released);
}

// What shared experts have in front of the first routed one, in pool order: their first parts.
template <class Config>
class FirstTokenWalk {
 public:
    __device__ FirstTokenWalk(const RankBuffers<Config>&, const ExpertOrder<Config>& order)
        : order_(order) {}

    // As that of PoolWalk.
    __device__ bool find(uint32_t token_idx, PulledToken& token) const {
        if (token_idx >= order_.num_first_tokens()) return false;
        const uint32_t num_part_tokens = order_.num_part_tokens(0);
        const uint32_t entry = token_idx / num_part_tokens;
        const uint32_t idx_in_part = token_idx % num_part_tokens;
        const ExpertTiles<Config> tiles(num_part_tokens);
        set_destination(token, entry * tiles.num_pool_blocks(), tiles, idx_in_part);
        //~ first_source
        token.source = {order_.own_rank_idx(), idx_in_part, Config::num_topk + entry};
        return true;
    }

 private:
    const ExpertOrder<Config>& order_;
};

// All warps of the grid that pull: the tokens that Walk(places, counts) finds, but for num_pulled
// that this warp has. `places`: of Config::Tokens, where sources are found. With a PoolWalk, after
// ExpertCounts::acquire. `pull_buffer`: a token's bytes of this warp's own in shared memory;
// `pull_barrier`: one arrival plus these bytes per token, first phase 0.
template <class Config, class PullPolicy, class Walk = PoolWalk<Config>, class Counts>
__device__ bool pull_tokens(const TokenPlaces<Config>& places, const Counts& counts,
                            uint32_t cta_idx, uint32_t warp_idx, uint32_t pull_buffer,
                            uint32_t pull_barrier, Waiter& waiter, uint32_t num_pulled = 0) {
    constexpr uint32_t num_warps = Config::num_sms * num_pull_warps<Config>;
    constexpr uint32_t token_bytes = SymmBuffer<Config>::token_bytes;
    using Order = ExpertOrder<Config>;
    const SymmBuffer<Config> local = places.local();
    Walk walk(places, counts);
    PulledToken token;
    uint32_t parity = num_pulled % 2;  //~ pulled_parity

    // The callers' inputs were written with ordinary stores, on other ranks too. Acquiring the
    // counts has made them visible to ordinary loads, this makes them visible to bulk copies.
    ptx::fence_proxy_async();  //~ pull_fence

    //~ pulled_before
    for (uint32_t token_idx = cta_idx * num_pull_warps<Config> + warp_idx + num_pulled * num_warps;
         walk.find(token_idx, token); token_idx += num_warps) {
        const auto source = places.of(token.source.rank_idx);
        // Read before the first wait, so that this load is under way with the others.
        float topk_weight = 0.0f;
        if (ptx::lane_idx() == 0) {
            ptx::mbarrier_arrive_expect_tx(pull_barrier, token_bytes);  //~ pull_bytes
            ptx::cp_async_bulk_shared_global(pull_buffer, source.input_x(token.source.token_idx),
                                             token_bytes, pull_barrier);
            [[maybe_unused]] const uint32_t slot =
                token.source.token_idx * Config::num_topk + token.source.topk_idx;
            if constexpr (Order::has_shared) {
                topk_weight = 1.0f;
                //~ shared_weight
                if (token.source.topk_idx < Config::num_topk) {
                    topk_weight = *source.input_topk_weights(slot);
                }
            } else if constexpr (Config::Tokens::are_here) {
                topk_weight = 1.0f;  // whoever combines the rows applies the weights
            } else {
                topk_weight = *source.input_topk_weights(slot);
            }
        }
        bool takes_used = false;
        if constexpr (PoolRing<Config>::wraps) {
            takes_used = takes_used_rows<Config>(token);
            if (takes_used && !await_rows(local, token, waiter)) return false;  //~ rows_awaited
        }
        PullPolicy policy;
        policy.store_scales(local, source, token);
        if (ptx::lane_idx() == 0) {
            *local.l1_topk_weights(token.pool_token_idx) = topk_weight;
            *local.token_src_metadata(token.pool_token_idx) = token.source;
        }

        //~ token_here
        if (!waiter.warp_mbarrier(WaitSite::token_arrival, pull_barrier, parity)) return false;
        parity ^= 1;  //~ pull_parity
        policy.rewrite_token(token, pull_buffer);
        __syncwarp();

        // Lane 0 publishes for the whole warp: the other lanes' stores of scales happen before the
        // __syncwarp, its own bulk store is complete and visible to it after wait_group (not
        // .read), and the release covers both. The reader, which loads tokens and scales with TMA,
        // puts fence.proxy.async between its acquire and its first load.
        if (ptx::lane_idx() == 0) {
            // Puts the copy behind what await_rows has acquired. Only here, where nothing else is
            // under way that the fence could wait for.
            if (takes_used) ptx::fence_proxy_async_global();  //~ rows_fence
            ptx::cp_async_bulk_global_shared(local.l1_tokens(token.pool_token_idx), pull_buffer,
                                             token_bytes);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group<0>();  //~ token_written
            //~ token_arrived
            ptx::red_add_release_gpu(local.l1_arrival_count(token.pool_block_idx), 1);
        }
        __syncwarp();  // the buffer is free again
    }
    return true;
}

// Before ExpertCounts::acquire: pulls the tokens of shared experts in front of the first routed
// expert, whose sources and places do not depend on other ranks. Otherwise as above. Returns how
// many tokens this warp has pulled.
template <class Config, class PullPolicy>
__device__ uint32_t pull_first_tokens(const RankBuffers<Config>& buffers,
                                      const ExpertOrder<Config>& order, uint32_t cta_idx,
                                      uint32_t warp_idx, uint32_t pull_buffer,
                                      uint32_t pull_barrier, Waiter& waiter) {
    pull_tokens<Config, PullPolicy, FirstTokenWalk<Config>>(buffers, order, cta_idx, warp_idx,
                                                            pull_buffer, pull_barrier, waiter);
    constexpr uint32_t num_warps = Config::num_sms * num_pull_warps<Config>;
    const uint32_t first = cta_idx * num_pull_warps<Config> + warp_idx;
    const uint32_t end = order.num_first_tokens();
    return first < end ? ceil_div(end - first, num_warps) : 0;
}

}  // namespace deep_moe
