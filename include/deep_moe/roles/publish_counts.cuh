// Dispatch, step 4: tell every expert's owner how many tokens this rank has for it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"

namespace deep_moe {

// The dispatch threads of the CTA that came last to the gather: the send counts and the lists are
// complete.
//
// The additions to the owners' sums are the signal that everything of this rank is there: its
// inputs, which were written before the kernel started, its lists and its counts. Whoever has read
// a complete sum and acquires (Scheduler::acquire_expert_counts) may read them on every rank.
//
// Order: the other CTAs' writes happen before they come to the gather, and that before what this
// thread does; the fence, with the relaxed additions behind it, releases all of it at sys scope.
// One fence serves many additions, each of which would wait for a remote write if it were a release
// itself.
template <class Config>
__device__ void publish_counts(const RankBuffers<Config>& buffers, uint32_t thread_idx) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    // Loads of a batch are under way together.
    constexpr uint32_t batch_size = min(ceil_div(Config::num_experts, num_threads), 8u);
    const SymmBuffer<Config> local = buffers.local();

    for (uint32_t first = thread_idx; first < Config::num_experts;
         first += batch_size * num_threads) {
        uint64_t send_counts[batch_size];
        const auto for_each_expert = [&](const auto& visit) {
#pragma unroll
            for (uint32_t i = 0; i < batch_size; ++i) {
                const uint32_t expert_idx = first + i * num_threads;
                if (expert_idx < Config::num_experts) visit(expert_idx, send_counts[i]);
            }
        };
        for_each_expert([&](uint32_t expert_idx, uint64_t& send_count) {
            send_count = ptx::ld_relaxed_gpu(local.expert_send_count(expert_idx));
        });
        for_each_expert([&](uint32_t expert_idx, uint64_t send_count) {
            const SymmBuffer<Config> owner = buffers.of(expert_idx / Config::num_experts_per_rank);
            ptx::st_relaxed_sys(owner.expert_recv_count(buffers.rank_idx(),
                                                        expert_idx % Config::num_experts_per_rank),
                                send_count);
        });
        ptx::fence_release_sys();
        for_each_expert([&](uint32_t expert_idx, uint64_t send_count) {
            const SymmBuffer<Config> owner = buffers.of(expert_idx / Config::num_experts_per_rank);
            ptx::red_add_relaxed_sys(
                owner.expert_recv_sum(expert_idx % Config::num_experts_per_rank), send_count);
        });
    }
}

}  // namespace deep_moe
