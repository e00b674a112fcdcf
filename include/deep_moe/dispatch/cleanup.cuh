// Dispatch: leave the control part as the next call expects it, and count what was received.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sync/grid_gather.cuh"

namespace deep_moe {

// Zeroes `words` with `num_threads` threads.
template <class Word>
__device__ void zero(Word* words, uint32_t num_words, uint32_t thread_idx, uint32_t num_threads) {
    for (uint32_t i = thread_idx; i < num_words; i += num_threads) words[i] = 0;
}

// The same with atomic stores. A peer's addition to a sum is known by its result, which orders it
// before other atomic accesses only, and `stop_later_calls` may run meanwhile.
__device__ inline void zero_relaxed(uint64_t* words, uint32_t num_words, uint32_t thread_idx,
                                    uint32_t num_threads) {
    for (uint32_t i = thread_idx; i < num_words; i += num_threads) {
        ptx::st_relaxed_sys(words + i, uint64_t{0});  //~ zeroed_relaxed
    }
}

// One thread of each CTA that has given up.
//
// Calls may have been launched behind this one, by other layers or in a graph, and would begin with
// what this call leaves. So they find marks: in a send count, with which they send nothing; in a
// sum, which is never complete, so that no role computes; and in the gather's counter, with which
// no CTA comes last to a gather any more, so that they tell other ranks nothing. A CTA that cleans
// up meanwhile may remove the first two marks. Then it gives up too, and makes them anew, or it
// goes on, but then all ranks have received what this call sends.
template <class Config>
__device__ void stop_later_calls(const SymmBuffer<Config>& local) {
    end_gathers(local.grid_gather_counter());
    ptx::red_or_relaxed_sys(local.expert_send_count(0), SymmBuffer<Config>::rank_gave_up);
    ptx::red_or_relaxed_sys(local.expert_recv_sum(0), SymmBuffer<Config>::rank_gave_up);
}

// Zeroes the words by which blocks were awaited and claimed. All dispatch threads of a CTA, when
// every role on this rank has finished with these words.
template <class Config>
__device__ void clean_up_blocks(const SymmBuffer<Config>& local, const ExpertCounts<Config>& counts,
                                uint32_t num_pool_blocks, uint32_t thread_idx) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    //~ l1_arrivals_zeroed
    zero(local.l1_arrival_count(0), num_pool_blocks, thread_idx, num_threads);
    zero(local.l2_arrival_mask(0), num_pool_blocks * Config::Symm::l2_arrival_mask_dim1, thread_idx,
         num_threads);  //~ l2_arrivals_zeroed

    zero(local.num_claimed_blocks(), 1, thread_idx, num_threads);  //~ claims_zeroed
    if constexpr (PoolRing<Config>::wraps) {
        if (counts.num_reused_blocks() != 0) {
            //~ releases_zeroed
            zero(local.release_count(0), num_pool_blocks, thread_idx, num_threads);
        }
    }
}

// All dispatch threads of the CTA that came last to the gather before combine: every role on this
// rank has finished with these words (compute_done), and no peer writes them before the rank
// barrier after clean-up.
//
// Zeroes what a call makes non-zero: counts in full, the claims, and arrivals up to the last pool
// block in use. One CTA does it in the time that a signal takes to another rank, or in less.
template <class Config>
__device__ void clean_up(const KernelArgs& args, const SymmBuffer<Config>& local,
                         const ExpertCounts<Config>& counts, uint32_t thread_idx) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;

    const uint32_t num_pool_blocks = counts.num_pool_blocks_in_use();
    //~ send_counts_zeroed
    zero_relaxed(local.expert_send_count(0), Config::num_experts, thread_idx, num_threads);
    zero(local.expert_recv_count(0, 0), Config::num_ranks * Config::num_experts_per_rank,
         thread_idx, num_threads);  //~ recv_counts_zeroed
    //~ recv_sums_zeroed
    zero_relaxed(local.expert_recv_sum(0), Config::num_experts_per_rank, thread_idx, num_threads);
    clean_up_blocks(local, counts, num_pool_blocks, thread_idx);

    int32_t* const stats = args.cumulative_local_expert_recv_stats;
    if (stats == nullptr || thread_idx >= warp_size) return;  //~ stats_once
    counts.for_each_kept_count([&](uint32_t expert_idx, uint32_t num_tokens) {
        ptx::red_add_relaxed_gpu(stats + expert_idx, static_cast<int32_t>(num_tokens));
    });
}

}  // namespace deep_moe
