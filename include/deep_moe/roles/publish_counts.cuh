// Dispatch, step 4: tell every expert's owner how many tokens this rank has for it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"

namespace deep_moe {

// The dispatch threads of CTA 0, after the grid barrier that completes the send counts.
//
// The schedulers of the owner start as soon as the sums have all reports in their high words. They
// take nothing but the number from there, so the additions need no order; what else was written
// for the owner (lists, counts per rank) it reads after the rank barrier.
template <class Config>
__device__ void publish_counts(const RankBuffers<Config>& buffers, uint32_t thread_idx) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    const SymmBuffer<Config> local = buffers.local();
    for (uint32_t i = thread_idx; i < Config::num_experts; i += num_threads) {
        const uint64_t send_count = ptx::ld_relaxed_gpu(local.expert_send_count(i));
        const uint32_t local_expert_idx = i % Config::num_experts_per_rank;
        const SymmBuffer<Config> owner = buffers.of(i / Config::num_experts_per_rank);
        ptx::st_relaxed_sys(owner.expert_recv_count(buffers.rank_idx(), local_expert_idx),
                            send_count);
        ptx::red_add_relaxed_sys(owner.expert_recv_sum(local_expert_idx), send_count);
    }
}

}  // namespace deep_moe
