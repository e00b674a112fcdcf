// The dispatch warps: send this rank's routing, pull the tokens of its experts, and, since they own
// what waits for the grid and for all ranks, open combine and close the call.
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

// One warp of the grid: what came, from which the host picks the tile of a later call.
// The store needs no order, and has all of the call's time to cross to the host's memory.
template <class Config>
__device__ void tell_host(const KernelArgs& args, const Scheduler<Config>& scheduler) {
    uint32_t received = scheduler.num_received_tokens();
    if (scheduler.is_uneven(received)) received |= received_unevenly;
    if (ptx::lane_idx() == 0) ptx::st_relaxed_sys(&args.status->received, received);
}

// All threads of warps 0 .. num_dispatch_warps - 1. `shared_memory`: start of Config::Smem.
//
// Where CTAs and ranks meet, in order. To a gather every CTA of the rank comes, and the last one
// goes on for the rank:
//   gather before publish         CTAs come with their counts drawn and their lists written; the
//                                 last one publishes them. No CTA comes to the next gather before
//                                 that: it waits for counts, this rank's among them
//   gather before combine         CTAs come with their blocks done: nothing of this rank uses the
//                                 schedule, the pools or any rank's inputs any more, and all its
//                                 contributions are written. The last one tells all ranks, and then
//                                 cleans up for its rank while the others may still be computing
//   rank barrier before combine   the same of all ranks; every CTA waits for it, to combine
//   rank barrier after clean-up   the control words of all ranks are zero: in their next calls they
//                                 may publish to each other. Nobody but the CTA that cleaned up
//                                 waits for it, while others combine; that keeps this rank's
//                                 kernel, and so its next one, waiting
//
// After an abort every step is skipped, but the two named barriers shared with other roles are
// still passed, so nobody is left waiting. This rank tells nobody anything any more, in this call
// nor in those launched behind it, until the host resets the buffer.
template <class Config, class PullPolicy>
__device__ void dispatch(const KernelArgs& args, uint32_t shared_memory) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    const RankBuffers<Config> buffers(args);
    const uint32_t cta_idx = blockIdx.x;
    const uint32_t thread_idx = threadIdx.x;
    const uint32_t warp_idx = ptx::warp_idx();
    Waiter waiter(args);
    DispatchBarriers<Config> barriers(buffers, thread_idx, waiter);
    Scheduler<Config> scheduler(buffers.local(), cta_idx);

    Tracer<Config> trace(args, TraceTrack::dispatch, 0);

    // Send.
    trace.mark(TraceStep::count_tokens);
    count_tokens<Config>(buffers, args.num_tokens, cta_idx, thread_idx,
                         shared_memory + Config::Smem::expert_count_offset, barriers);
    trace.mark(TraceStep::gather_before_publish);
    barriers.cta();
    if (barriers.is_last_cta()) {
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
    const uint32_t round = RankBarrier<Config>::next_round(buffers.local());
    finish_compute<Config>(waiter);
    trace.mark(TraceStep::gather_before_combine);
    const bool is_last = barriers.is_last_cta();
    if (is_last) {
        barriers.arrive_for_rank(round);
        trace.mark(TraceStep::clean_up);
        clean_up<Config>(args, buffers.local(), scheduler, thread_idx);
    }
    trace.mark(TraceStep::rank_barrier_before_combine);
    barriers.await_ranks(WaitSite::rank_barrier_before_combine, round, is_last);
    // Close: when the last rank has cleaned up, any of them may start the next call.
    if (await_combine<Config>(waiter) && is_last) {
        trace.mark(TraceStep::rank_barrier_after_cleanup);
        barriers.arrive_for_rank(round + 1);
        barriers.await_ranks(WaitSite::rank_barrier_after_cleanup, round + 1, is_last);
    }
    if (waiter.aborted() && thread_idx == 0) stop_later_calls<Config>(buffers.local());
    trace.mark(TraceStep::end);
    trace.last_anchor();
}

}  // namespace deep_moe
