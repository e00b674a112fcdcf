// The dispatch warps: send this rank's routing, pull the tokens of its experts, and, since they own
// the grid and rank barriers, open combine and close the call.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/roles/cleanup.cuh"
#include "deep_moe/roles/count_tokens.cuh"
#include "deep_moe/roles/dispatch_barriers.cuh"
#include "deep_moe/roles/handover.cuh"
#include "deep_moe/roles/publish_counts.cuh"
#include "deep_moe/roles/pull_tokens.cuh"
#include "deep_moe/scheduler.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace.cuh"

namespace deep_moe {

// One warp of the grid: how many tokens came, from which the host picks the tile of a later call.
// The store needs no order, and has all of the call's time to cross to the host's memory.
template <class Config>
__device__ void tell_host(const KernelArgs& args, const Scheduler<Config>& scheduler) {
    const uint32_t num_received_tokens = scheduler.num_received_tokens();
    if (ptx::lane_idx() == 0) {
        ptx::st_relaxed_sys(&args.status->num_received_tokens, num_received_tokens);
    }
}

// All threads of warps 0 .. num_dispatch_warps - 1. `shared_memory`: start of Config::Smem.
//
// After an abort every step is skipped, but the two named barriers shared with other roles are
// still passed, so nobody is left waiting.
template <class Config, class PullPolicy>
__device__ void dispatch(const KernelArgs& args, uint32_t shared_memory) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    const RankBuffers<Config> buffers(args);
    const uint32_t cta_idx = blockIdx.x;
    const uint32_t thread_idx = threadIdx.x;
    const uint32_t warp_idx = ptx::warp_idx();
    Waiter waiter(args);
    DispatchBarriers<Config> barriers(buffers, cta_idx, thread_idx, waiter);
    Scheduler<Config> scheduler(buffers.local(), cta_idx);

    Tracer<Config> trace(args, TraceTrack::dispatch, 0);

    // Send.
    trace.mark(TraceStep::count_tokens);
    count_tokens<Config>(buffers, args.num_tokens, cta_idx, thread_idx,
                         shared_memory + Config::Smem::expert_count_offset, barriers);
    trace.mark(TraceStep::grid_barrier_before_publish);
    if (barriers.grid(WaitSite::grid_barrier_before_publish) && cta_idx == 0) {
        trace.mark(TraceStep::publish_counts);
        publish_counts<Config>(buffers, thread_idx);
    }

    // Pull, as soon as all ranks have published.
    trace.mark(TraceStep::await_counts);
    if (scheduler.acquire_expert_counts(waiter)) {
        if (cta_idx == 0 && warp_idx == 0) tell_host<Config>(args, scheduler);
        trace.mark(TraceStep::pull);
        pull_tokens<Config, PullPolicy>(
            buffers, scheduler, cta_idx, warp_idx,
            shared_memory + Config::Smem::pull_buffers_offset + warp_idx * Config::hidden,
            shared_memory + Config::Smem::pull_barriers_offset + warp_idx * sizeof(uint64_t),
            waiter);
    }

    // Open combine, when all blocks of all ranks are done.
    trace.mark(TraceStep::await_compute);
    finish_compute<Config>(waiter);
    trace.mark(TraceStep::grid_barrier_before_combine);
    barriers.grid(WaitSite::grid_barrier_before_combine);
    trace.mark(TraceStep::rank_barrier_before_combine);
    barriers.ranks(WaitSite::rank_barrier_before_combine);
    trace.mark(TraceStep::grid_barrier_combine);
    barriers.grid(WaitSite::grid_barrier_combine);
    const bool combining = await_combine<Config>(waiter);

    // Close: when the last rank has cleaned up, any of them may start the next call.
    trace.mark(TraceStep::clean_up);
    if (combining) {
        clean_up<Config>(args, buffers.local(), scheduler, cta_idx, thread_idx);
    }
    trace.mark(TraceStep::grid_barrier_after_cleanup);
    barriers.grid(WaitSite::grid_barrier_after_cleanup);
    trace.mark(TraceStep::rank_barrier_after_cleanup);
    barriers.ranks(WaitSite::rank_barrier_after_cleanup);
    trace.mark(TraceStep::end);
    trace.last_anchor();
}

}  // namespace deep_moe
