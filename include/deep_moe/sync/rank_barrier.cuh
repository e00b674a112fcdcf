// A barrier over all ranks. One CTA of each rank, the last that comes to a gather, arrives for its
// rank. A waiting CTA polls its own rank's signal. Any CTA may poll: if it heard of the signal from
// another CTA, that would be one or two trips through the L2 cache later.
//
// Every rank adds to a signal word on every rank. Two signals alternate, and each counts up to
// num_ranks in one round and back down to 0 in the next, so that nothing is ever reset and the
// words may be used again at once: a rank that is one barrier ahead touches the other signal, and
// cannot get two ahead. A rank's own counter of barriers says which round it is: bit 0 selects the
// signal, bit 1 the direction.
//
// For a masked rank each rank arrives on its own signal. So signals count up to num_ranks with any
// mask, and the mask may change between any two calls. The masked rank's words stay as they are: it
// may take part again when all ranks have been reset.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

template <class Config>
class RankBarrier {
 public:
    // The round of the next barrier of this rank. Any thread calls this before its CTA comes to the
    // gather in front of that barrier, because the CTA that arrives increments the counter.
    static __device__ uint32_t next_round(const SymmBuffer<Config>& local) {
        return ptx::ld_relaxed_sys(local.rank_barrier_counter());
    }

    // ranks: those that take part in the call.
    __device__ RankBarrier(const RankBuffers<Config>& buffers, const CallRanks<Config>& ranks,
                           uint32_t round)
        : buffers_(buffers), ranks_(ranks), round_(round) {}

    // One warp of the rank, all lanes, in the CTA that came last to a gather.
    //
    // Order: what any CTA of this rank wrote to any rank's memory before it came to the gather is
    // visible to whoever passes this barrier. The writes happen before the CTA's arrival there (CTA
    // barrier, then release at gpu scope), that arrival is observed by the last CTA (acquire at gpu
    // scope), and the release at sys scope here covers all it has observed, not only what it wrote
    // itself: causality order is transitive over scopes as long as each step links threads that its
    // scope contains. So no writer needs a fence of its own.
    __device__ void arrive() const {
        // The counter moves before the signals: a peer that runs out of time reads it to learn who
        // has not arrived.
        if (ptx::lane_idx() == 0) {
            ptx::st_relaxed_sys(buffers_.local().rank_barrier_counter(), round_ + 1);
        }
        __syncwarp();
        for (uint32_t rank = ptx::lane_idx(); rank < Config::num_ranks; rank += warp_size) {
            //~ arrives_for_masked
            const uint32_t to = ranks_.contains(rank) ? rank : buffers_.rank_idx();
            ptx::red_add_release_sys(buffers_.of(to).rank_barrier_signals(signal_idx()),
                                     counts_up() ? 1 : -1);  //~ rank_arrives
        }
    }

    // Any whole converged warp, in a CTA that has come to the gather. `has_arrived`: this warp did
    // for its rank. The others may be waiting for their own rank as well.
    __device__ bool wait(WaitSite site, bool has_arrived, Waiter& waiter) const {
        const SymmBuffer<Config> local = buffers_.local();
        const auto num_arrivals = [&] {
            const auto signal = static_cast<uint32_t>(
                ptx::ld_acquire_sys(local.rank_barrier_signals(signal_idx())));  //~ rank_polls
            return counts_up() ? signal : Config::num_ranks - signal;
        };
        const auto late_ranks = [&] {
            RankSet late;
#pragma unroll 1  // once per call at most; unrolled, it costs registers
            for (uint32_t rank = 0; rank < Config::num_ranks; ++rank) {
                if constexpr (Config::masks_ranks) {
                    if (!ranks_.contains(rank)) continue;
                }
                const uint32_t next = ptx::ld_relaxed_sys(buffers_.of(rank).rank_barrier_counter());
                // One that takes part again without a reset is further behind.
                const bool is_late = Config::masks_ranks ? next - round_ - 1 > 1 : next == round_;
                if (is_late) late.insert(rank);
            }
            return late;
        };
        return waiter.warp_until(site, Config::num_ranks, num_arrivals, late_ranks, !has_arrived);
    }

 private:
    __device__ uint32_t signal_idx() const { return round_ & 1; }
    __device__ bool counts_up() const { return (round_ & 2) == 0; }

    const RankBuffers<Config>& buffers_;
    const CallRanks<Config>& ranks_;
    uint32_t round_;
};

}  // namespace deep_moe
