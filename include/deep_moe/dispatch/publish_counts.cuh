// Dispatch: tell every expert's owner how many tokens this rank has for it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/expert_batches.cuh"
#include "deep_moe/dispatch/list_pages.cuh"
#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// The dispatch threads of the CTA that came last to the gather: the send counts and the lists are
// complete.
//
// The additions to the owners' sums are the signal that this rank's data is complete: its inputs,
// which were written before the kernel started, its lists and its counts. A thread that has read a
// complete sum and acquires it (ExpertCounts::acquire) may read these on every rank.
//
// Order: the other CTAs' writes happen before they come to the gather, and that before what this
// thread does; the fence, with the relaxed additions behind it, releases all of it at sys scope.
// One fence serves many additions, each of which would wait for a remote write if it were a release
// itself.
//
// send_count(expert_idx): in the low word the rank's tokens for the expert, in the high word the
// rank's CTAs that have reported.
template <class Config, class SendCount>
__device__ void publish_counts(const RankBuffers<Config>& buffers, const CallRanks<Config>& ranks,
                               uint32_t thread_idx, const SendCount& send_count) {
    const SymmBuffer<Config> local = buffers.local();
    for_each_expert_batch<Config>(thread_idx, [&](const ExpertBatch<Config>& batch) {
        uint64_t send_counts[ExpertBatch<Config>::size];
        batch.for_each(
            [&](uint32_t expert_idx, uint32_t i) { send_counts[i] = send_count(expert_idx); });
        batch.for_each([&](uint32_t expert_idx, uint32_t i) {
            if constexpr (Config::masks_ranks) {
                if (!owned_by_active<Config>(expert_idx, ranks)) return;  //~ active_gets_count
            }
            const SymmBuffer<Config> owner = buffers.of(expert_idx / Config::num_experts_per_rank);
            ptx::st_relaxed_sys(owner.expert_recv_count(buffers.rank_idx(),
                                                        expert_idx % Config::num_experts_per_rank),
                                send_counts[i]);
        });
        ptx::fence_release_sys();  //~ publish_fence
        batch.for_each([&](uint32_t expert_idx, uint32_t i) {
            if constexpr (Config::masks_ranks) {
                if (!owned_by_active<Config>(expert_idx, ranks)) return;  //~ sum_published
            }
            const SymmBuffer<Config> owner = buffers.of(expert_idx / Config::num_experts_per_rank);
            ptx::red_add_relaxed_sys(
                owner.expert_recv_sum(expert_idx % Config::num_experts_per_rank), send_counts[i]);
        });
        // No CTA of this rank asks for pages any more: all have written their lists.
        batch.for_each([&](uint32_t expert_idx, uint32_t i) {
            //~ pages_forgotten
            forget_pages<Config>(local, expert_idx, static_cast<uint32_t>(send_counts[i]));
        });
    });
}

}  // namespace deep_moe
