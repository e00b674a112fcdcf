// Where the dispatch warps meet: inside the CTA, over the grid, and over all ranks.
//
// They own every gather of the grid and every rank barrier of the kernel. Other roles hand over to
// them with named barriers, so no two roles can be in one of these at once.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/grid_gather.cuh"
#include "deep_moe/sync/rank_barrier.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// All threads of the dispatch warps call each method; `thread_idx` counts from the first of them.
template <class Config>
class DispatchBarriers {
    static constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;

 public:
    __device__ DispatchBarriers(const RankBuffers<Config>& buffers, uint32_t thread_idx,
                                Waiter& waiter)
        : buffers_(buffers), is_first_warp_(thread_idx < warp_size), waiter_(waiter) {}

    // Inside the CTA. False once any of the warps has given up, or a thread says so now.
    __device__ bool cta(bool may_go_on = true) {
        return waiter_.follow(
            ptx::bar_red_and(NamedBarrier::dispatch, num_threads, may_go_on && !waiter_.aborted()));
    }

    // Over this rank's grid: this CTA comes, once per gather, and nobody waits. True in the last
    // one that comes, which sees everything that any CTA wrote before, and in none after an abort.
    // Behind a barrier of the CTA, where all warps have heard of an abort.
    __device__ bool come_to_gather() {
        bool is_last = false;
        if (is_first_warp_) {
            is_last = grid_gather<Config::num_sms>(buffers_.local().grid_gather_counter(), waiter_);
        }
        return !ptx::bar_red_and(NamedBarrier::dispatch, num_threads, !is_last);
    }

    // Over all ranks, for which the CTA that came last to the gather arrives. The first warp
    // waits; the others hear of the outcome at the next barrier that votes.
    __device__ void arrive_for_rank(const CallRanks<Config>& ranks, uint32_t round) const {
        if (is_first_warp_) RankBarrier<Config>(buffers_, ranks, round).arrive();
    }
    __device__ void await_ranks(WaitSite site, const CallRanks<Config>& ranks, uint32_t round,
                                bool has_arrived) {
        if (!is_first_warp_) return;
        RankBarrier<Config>(buffers_, ranks, round).wait(site, has_arrived, waiter_);
    }

 private:
    const RankBuffers<Config>& buffers_;
    bool is_first_warp_;
    Waiter& waiter_;
};

}  // namespace deep_moe
