// The barriers of the dispatch warps: inside the CTA, over the grid, and over all ranks.
//
// The dispatch warps own every grid and rank barrier of the kernel. Other roles hand over to them
// with named barriers, so no two roles can be in one of these barriers at once.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/sync/grid_barrier.cuh"
#include "deep_moe/sync/rank_barrier.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// All threads of the dispatch warps call each method; `thread_idx` counts from the first of them.
// Each ends with the same outcome in all of them, and after an abort costs a CTA barrier only.
template <class Config>
class DispatchBarriers {
    static constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;

 public:
    __device__ DispatchBarriers(const RankBuffers<Config>& buffers, uint32_t cta_idx,
                                uint32_t thread_idx, Waiter& waiter)
        : buffers_(buffers),
          cta_idx_(cta_idx),
          is_first_warp_(thread_idx < warp_size),
          waiter_(waiter) {}

    // Inside the CTA. False once any of the warps has given up.
    __device__ bool cta() {
        return waiter_.follow(
            ptx::bar_red_and(NamedBarrier::dispatch, num_threads, !waiter_.aborted()));
    }

    // Over this rank's grid: everything written before is visible after, in all CTAs.
    __device__ bool grid(WaitSite site) {
        cta();
        if (is_first_warp_) {
            grid_barrier<Config::num_sms>(site, buffers_.local().grid_sync_counter(), cta_idx_,
                                          waiter_);
        }
        return cta();
    }

    // Over all ranks, but only CTA 0 waits for them: `grid` before and, if the others depend on the
    // outcome, after it.
    __device__ bool ranks(WaitSite site) {
        cta();
        if (is_first_warp_ && cta_idx_ == 0) rank_barrier(site, buffers_, waiter_);
        return cta();
    }

 private:
    const RankBuffers<Config>& buffers_;
    uint32_t cta_idx_;
    bool is_first_warp_;
    Waiter& waiter_;
};

}  // namespace deep_moe
