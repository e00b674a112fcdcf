// Dispatch: count how many of this rank's tokens go to each expert, and find each token's place in
// the list that the expert's owner will pull from.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/dispatch_barriers.cuh"
#include "deep_moe/dispatch/expert_batches.cuh"
#include "deep_moe/dispatch/list_pages.cuh"
#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// Calls visit(slot, expert_idx) for this thread's share of the rank's top-k slots that name an
// expert, a masked rank's too.
template <class Config, class Visit>
__device__ void for_each_routed_slot(const SymmBuffer<Config>& local, uint32_t num_tokens,
                                     uint32_t cta_idx, uint32_t thread_idx, const Visit& visit) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    const uint32_t num_slots = num_tokens * Config::num_topk;
    for (uint32_t slot = cta_idx * num_threads + thread_idx; slot < num_slots;
         slot += Config::num_sms * num_threads) {
        const int64_t expert_idx = *local.input_topk_idx(slot);
        //~ slot_visited
        if (is_routed<Config>(expert_idx)) visit(slot, static_cast<uint32_t>(expert_idx));
    }
}

// A whole converged warp: gives up if the rank itself is masked. The others do not expect it.
template <class Config>
__device__ void refuse_masked_itself(const CallRanks<Config>& ranks, uint32_t rank_idx,
                                     Waiter& waiter) {
    const bool is_active = ranks.contains(rank_idx);
    if (!is_active && ptx::lane_idx() == 0) {
        waiter.fail(WaitCode::masked_itself, WaitSite::none, 0, 0);
    }
    waiter.warp_agrees(is_active);
}

// All dispatch threads of the grid. `expert_counts`: u32[num_experts] in shared memory.
//
// The same CTA reads a slot twice, so that the CTA's counts match its writes. After this function,
// until the next gather, the source lists are on their way to their owners. If an earlier call of
// this rank has failed, nothing is sent, and the dispatch warps have given up. A thread that waits
// for a page of a list in vain gives up; its CTA gives up at the next barrier. A rank that is
// masked gives up before it sends anything.
//
// The slots are counted before the warp waits for the mask, so that both are loaded in one time.
template <class Config>
__device__ void count_tokens(const RankBuffers<Config>& buffers,
                             const typename CallRanks<Config>::Mask& mask, uint32_t num_tokens,
                             uint32_t cta_idx, uint32_t thread_idx, uint32_t expert_counts,
                             DispatchBarriers<Config>& barriers, Waiter& waiter) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    const SymmBuffer<Config> local = buffers.local();
    auto* const counts = static_cast<uint32_t*>(__cvta_shared_to_generic(expert_counts));

    // Tokens of this CTA per expert.
    for (uint32_t i = thread_idx; i < Config::num_experts; i += num_threads) counts[i] = 0;
    barriers.cta();  //~ counts_zeroed
    for_each_routed_slot(local, num_tokens, cta_idx, thread_idx,
                         [&](uint32_t, uint32_t expert_idx) {
                             //~ slot_counted
                             ptx::red_add_shared(expert_counts + expert_idx * sizeof(uint32_t), 1);
                         });
    const CallRanks<Config> ranks(mask);
    if constexpr (Config::masks_ranks) {
        refuse_masked_itself<Config>(ranks, buffers.rank_idx(), waiter);
    }
    barriers.cta();  //~ slots_counted
    if constexpr (Config::masks_ranks) {
        if (waiter.aborted()) return;
    }

    // One atomic reports the count and draws as many consecutive places in the owner's list:
    // the low word it returns is the first of them. Where pages begin among them, this CTA takes
    // these before it waits for any.
    constexpr uint64_t one_cta = uint64_t{1} << 32;
    bool earlier_call_failed = false;
    for_each_expert_batch<Config>(thread_idx, [&](const ExpertBatch<Config>& batch) {
        if constexpr (Config::masks_ranks) {
            batch.for_each([&](uint32_t expert_idx, uint32_t) {
                //~ masked_count_dropped
                if (!owned_by_active<Config>(expert_idx, ranks)) counts[expert_idx] = 0;
            });
        }
        uint64_t before[ExpertBatch<Config>::size];
        batch.for_each([&](uint32_t expert_idx, uint32_t i) {
            before[i] = ptx::atom_add_relaxed_gpu(local.expert_send_count(expert_idx),
                                                  one_cta + counts[expert_idx]);
        });
        if constexpr (ListPages<Config>::num_further != 0) {
            if (num_tokens * Config::num_topk > ListPages<Config>::num_slots) {
                take_pages<Config>(buffers, batch, before, counts);  //~ pages_taken
            }
        }
        batch.for_each([&](uint32_t expert_idx, uint32_t i) {
            counts[expert_idx] = static_cast<uint32_t>(before[i]);  //~ first_place
            earlier_call_failed |= (before[i] & SymmBuffer<Config>::rank_gave_up) != 0;
        });
    });
    if (!barriers.cta(!earlier_call_failed)) return;  //~ places_drawn

    // Tell each expert's owner where the token lies, so that the owner need not ask when it pulls.
    for_each_routed_slot(
        local, num_tokens, cta_idx, thread_idx, [&](uint32_t slot, uint32_t expert_idx) {
            if constexpr (Config::masks_ranks) {
                if (!owned_by_active<Config>(expert_idx, ranks)) return;  //~ active_is_listed_to
            }
            const uint32_t list_idx =
                ptx::atom_add_shared(expert_counts + expert_idx * sizeof(uint32_t), 1);
            ListPlace place;
            if (!find_own_place<Config>(buffers, expert_idx, list_idx, waiter, place)) return;
            const SymmBuffer<Config> owner = buffers.of(expert_idx / Config::num_experts_per_rank);
            *owner.src_token_topk_idx(place.page_idx, place.slot_idx) = slot;  //~ slot_listed
        });
}

}  // namespace deep_moe
