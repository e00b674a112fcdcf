// Dispatch, step 7: leave the control part as the next call expects it, and count what was
// received.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/scheduler.cuh"
#include "deep_moe/sync/grid_gather.cuh"

namespace deep_moe {

// Zeroes `words` with `num_threads` threads. The stores are relaxed because of `stop_later_calls`.
template <class Word>
__device__ void zero(Word* words, uint32_t num_words, uint32_t thread_idx, uint32_t num_threads) {
    for (uint32_t i = thread_idx; i < num_words; i += num_threads) {
        ptx::st_relaxed_gpu(words + i, Word{0});
    }
}

// One thread of each CTA that has given up.
//
// Calls may have been launched behind this one, by other layers or in a graph, and would begin with
// what it leaves. So they find marks: in a send count, with which they send nothing; in a sum,
// which is never complete, so that nobody computes; and no CTA comes last to a gather any more, so
// that they tell no other rank anything. A CTA that cleans up meanwhile may take the first two
// marks away: it gives up too, and makes them anew, or goes on, but then all ranks have got what
// this call sends.
template <class Config>
__device__ void stop_later_calls(const SymmBuffer<Config>& local) {
    end_gathers(local.grid_gather_counter());
    ptx::red_or_relaxed_sys(local.expert_send_count(0), SymmBuffer<Config>::rank_gave_up);
    ptx::red_or_relaxed_sys(local.expert_recv_sum(0), SymmBuffer<Config>::rank_gave_up);
}

// All dispatch threads of the grid, while combine runs, after the rank barrier before combine: by
// then every role on this rank has finished with these words (compute_done), and no peer writes
// them before the rank barrier after clean-up.
//
// Zeroes what a call makes non-zero: counts in full, the claims, arrivals up to the last pool block
// in use.
template <class Config>
__device__ void clean_up(const KernelArgs& args, const SymmBuffer<Config>& local,
                         const Scheduler<Config>& scheduler, uint32_t cta_idx,
                         uint32_t thread_idx) {
    constexpr uint32_t num_threads_per_cta = Config::num_dispatch_warps * warp_size;
    constexpr uint32_t num_threads = Config::num_sms * num_threads_per_cta;
    const uint32_t grid_thread_idx = cta_idx * num_threads_per_cta + thread_idx;

    const uint32_t num_pool_blocks = scheduler.num_pool_blocks_in_use();
    zero(local.expert_send_count(0), Config::num_experts, grid_thread_idx, num_threads);
    zero(local.expert_recv_count(0, 0), Config::num_ranks * Config::num_experts_per_rank,
         grid_thread_idx, num_threads);
    zero(local.expert_recv_sum(0), Config::num_experts_per_rank, grid_thread_idx, num_threads);
    zero(local.l1_arrival_count(0), num_pool_blocks, grid_thread_idx, num_threads);
    zero(local.l2_arrival_mask(0), num_pool_blocks * Config::num_l2_mask_words, grid_thread_idx,
         num_threads);

    zero(local.num_claimed_blocks(), 1, grid_thread_idx, num_threads);

    if (args.cumulative_local_expert_recv_stats == nullptr || cta_idx != 0) return;
    for (uint32_t i = 0; i < Config::num_experts_per_rank; ++i) {
        const uint32_t num_tokens = scheduler.num_tokens(i);
        if (thread_idx == 0) {
            ptx::red_add_relaxed_gpu(args.cumulative_local_expert_recv_stats + i,
                                     static_cast<int32_t>(num_tokens));
        }
    }
}

}  // namespace deep_moe
