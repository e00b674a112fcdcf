// A barrier over all ranks, by one CTA of each.
//
// Every rank adds to a signal word on every rank and waits for its own. Two signals alternate, and
// each counts up to num_ranks in one round and back down to 0 in the next, so that nothing is ever
// reset and the words may be used again at once: a rank that is one barrier ahead touches the other
// signal, and cannot get two ahead. A rank's own counter of barriers says which round it is: bit 0
// selects the signal, bit 1 the direction.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// One warp of CTA 0, all lanes, after a grid barrier; a second grid barrier passes the result on.
//
// Order: what any CTA of this rank wrote to any rank's memory before the grid barrier is visible to
// whoever passes this barrier. The writes happen before the CTA's arrival at the grid barrier (CTA
// barrier, then release at gpu scope), that arrival is observed by CTA 0 (acquire at gpu scope),
// and CTA 0's release at sys scope covers all it has observed, not only what it wrote itself:
// causality order is transitive over scopes as long as each step links threads that its scope
// contains. So no writer needs a fence of its own.
template <class Config>
__device__ __forceinline__ bool rank_barrier(WaitSite site, const RankBuffers<Config>& buffers,
                                             Waiter& waiter) {
    if (waiter.aborted()) return false;
    const SymmBuffer<Config> local = buffers.local();
    // Only this warp writes the counter, in this call and, with a kernel boundary between, others.
    const uint32_t round =
        __shfl_sync(full_warp, ptx::ld_relaxed_sys(local.rank_barrier_counter()), 0);
    const uint32_t signal_idx = round & 1;
    const bool counts_up = (round & 2) == 0;

    // The counter moves before the signals: a peer that runs out of time reads it to learn who has
    // not arrived.
    if (ptx::lane_idx() == 0) ptx::st_relaxed_sys(local.rank_barrier_counter(), round + 1);
    __syncwarp();
    for (uint32_t rank = ptx::lane_idx(); rank < Config::num_ranks; rank += warp_size) {
        ptx::red_add_release_sys(buffers.of(rank).rank_barrier_signal(signal_idx),
                                 counts_up ? 1 : -1);
    }

    const auto num_arrivals = [&] {
        const auto signal =
            static_cast<uint32_t>(ptx::ld_acquire_sys(local.rank_barrier_signal(signal_idx)));
        return counts_up ? signal : Config::num_ranks - signal;
    };
    const auto late_ranks = [&] {
        RankSet ranks;
#pragma unroll 1  // once per call at most; unrolled, it costs registers
        for (uint32_t rank = 0; rank < Config::num_ranks; ++rank) {
            if (ptx::ld_relaxed_sys(buffers.of(rank).rank_barrier_counter()) == round) {
                ranks.insert(rank);
            }
        }
        return ranks;
    };
    return waiter.warp_until(site, Config::num_ranks, num_arrivals, late_ranks);
}

}  // namespace deep_moe
