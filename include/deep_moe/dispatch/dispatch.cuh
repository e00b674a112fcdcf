// The dispatch warps. They send this rank's routing and pull the tokens of its experts. They own
// every wait for the grid and for all ranks, so they also open combine and close the call.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/cleanup.cuh"
#include "deep_moe/dispatch/count_few_tokens.cuh"
#include "deep_moe/dispatch/count_tokens.cuh"
#include "deep_moe/dispatch/dispatch_barriers.cuh"
#include "deep_moe/dispatch/publish_counts.cuh"
#include "deep_moe/dispatch/pull_tokens.cuh"
#include "deep_moe/dispatch/tell_host.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/expert_order.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/handover.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe {

// All threads of warps 0 .. num_dispatch_warps - 1. `shared_memory`: start of Config::Smem.
//
// Where CTAs and ranks meet, in order. To a gather every CTA of the rank comes, and the last one
// goes on for the rank:
//   gather before publish         CTAs come with their counts drawn and their lists written; the
//                                 last one publishes them. No CTA comes to the next gather before
//                                 that: it waits for counts, this rank's among them. A rank with
//                                 few slots has no such gather: its first CTA sends and publishes
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
template <class Config, class PullPolicy, class Publish>
__device__ void dispatch(const KernelArgs& args, uint32_t shared_memory, const Publish& publish) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    const RankBuffers<Config> buffers(args);
    const uint32_t cta_idx = blockIdx.x;
    const uint32_t thread_idx = threadIdx.x;
    const uint32_t warp_idx = ptx::warp_idx();
    Waiter waiter(args);
    DispatchBarriers<Config> barriers(buffers, thread_idx, waiter);
    const SymmBuffer<Config> local = buffers.local();
    ExpertCounts<Config> counts;

    Tracer<Config> trace(args, TraceTrack::dispatch, 0);

    // Send.
    trace.mark(TraceStep::count_tokens);
    const typename CallRanks<Config>::Mask mask(args.masked_ranks);
    const uint32_t expert_counts = shared_memory + Config::Smem::expert_count_offset;
    const bool sends_alone = has_few_slots<Config>(args.num_tokens);
    bool publishes = false;
    if (!sends_alone) {
        count_tokens<Config>(buffers, mask, args.num_tokens, cta_idx, thread_idx, expert_counts,
                             barriers, waiter);
        trace.mark(TraceStep::gather_before_publish);
        barriers.cta();                         //~ lists_written
        publishes = barriers.come_to_gather();  //~ gather_to_publish
    } else if (cta_idx == 0) {                  //~ one_sends
        count_few_tokens<Config>(buffers, mask, args.num_tokens, thread_idx, expert_counts,
                                 barriers, waiter);
        trace.mark(TraceStep::gather_before_publish);
        publishes = barriers.cta();  //~ few_listed
    }
    if (publishes) {
        trace.mark(TraceStep::publish_counts);
        publish_counts<Config>(
            buffers, CallRanks<Config>(mask), thread_idx, [&](uint32_t expert_idx) {
                return sends_alone ? few_send_count<Config>(expert_counts, expert_idx)
                                   : ptx::ld_relaxed_gpu(local.expert_send_count(expert_idx));
            });
    }

    // Pull, as soon as all ranks have published; what needs no other rank, before that.
    uint32_t num_pulled = 0;
    if constexpr (ExpertOrder<Config>::has_shared) {
        trace.mark(TraceStep::pull);
        counts.count_shared(args);
        if (pulls_tokens<Config>(warp_idx)) {
            num_pulled = pull_first_tokens<Config, PullPolicy>(
                buffers, counts, cta_idx, warp_idx,
                shared_memory + Config::Smem::pull_buffers_offset +
                    warp_idx * Config::Smem::pull_buffers_stride,
                shared_memory + Config::Smem::pull_barriers_offset +
                    warp_idx * Config::Smem::pull_barriers_stride,
                waiter);
        }
    }
    trace.mark(TraceStep::await_counts);
    if (counts.acquire(args, local, waiter)) {  //~ counts_acquired
        if (cta_idx == 0 && warp_idx == 0) tell_host<Config>(args, counts);
        trace.mark(TraceStep::pull);
        if (pulls_tokens<Config>(warp_idx)) {
            pull_tokens<Config, PullPolicy>(buffers, counts, cta_idx, warp_idx,
                                            shared_memory + Config::Smem::pull_buffers_offset +
                                                warp_idx * Config::Smem::pull_buffers_stride,
                                            shared_memory + Config::Smem::pull_barriers_offset +
                                                warp_idx * Config::Smem::pull_barriers_stride,
                                            waiter, num_pulled);  //~ pull_buffers
        } else {
            publish(local, waiter);
        }
    }

    // Open combine, when all blocks of all ranks are done.
    trace.mark(TraceStep::await_compute);
    const uint32_t round = RankBarrier<Config>::next_round(buffers.local());
    // Loaded anew, while the blocks are awaited: kept over the loop that pulls, it takes registers.
    const CallRanks<Config> ranks = buffers.active_ranks();
    sync_compute_done<Config>(waiter);
    trace.mark(TraceStep::gather_before_combine);
    const bool is_last = barriers.come_to_gather();  //~ gather_to_combine
    if (is_last) {
        barriers.arrive_for_rank(ranks, round);
        trace.mark(TraceStep::clean_up);
        clean_up<Config>(args, buffers.local(), counts, thread_idx);
    }
    trace.mark(TraceStep::rank_barrier_before_combine);
    //~ ranks_computed
    barriers.await_ranks(WaitSite::rank_barrier_before_combine, ranks, round, is_last);
    // Close: when the last rank has cleaned up, any of them may start the next call.
    if (sync_combine_ready<Config>(waiter) && is_last) {
        trace.mark(TraceStep::rank_barrier_after_cleanup);
        barriers.arrive_for_rank(ranks, round + 1);
        //~ ranks_clean
        barriers.await_ranks(WaitSite::rank_barrier_after_cleanup, ranks, round + 1, is_last);
    }
    if (waiter.aborted() && thread_idx == 0) stop_later_calls<Config>(buffers.local());
    trace.mark(TraceStep::end);
    trace.last_anchor();
}

}  // namespace deep_moe
