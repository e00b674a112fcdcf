// The dispatch warps of a call without other ranks. They bring the tokens of this rank's experts
// into the pool the same way as in a call over ranks, and zero the control words at the end.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/cleanup.cuh"
#include "deep_moe/dispatch/dispatch_barriers.cuh"
#include "deep_moe/dispatch/pull_tokens.cuh"
#include "deep_moe/dispatch/tell_host.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/layout/token_places.cuh"
#include "deep_moe/sync/grid_gather.cuh"
#include "deep_moe/sync/handover.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe {

// The caller's rows in pool order. All members uniform.
template <class Config>
class LocalWalk : ExpertRuns<Config> {
    using Runs = ExpertRuns<Config>;
    using Runs::expert_begin_, Runs::expert_end_, Runs::place_;

 public:
    __device__ LocalWalk(const TokenPlaces<Config>& places, const ExpertCounts<Config>& counts)
        : Runs(places.local(), counts), places_(places) {}

    // As that of PoolWalk.
    __device__ bool find(uint32_t token_idx, PulledToken& token) {
        if (token_idx >= expert_end_) {
            if (!this->enter_expert_of(token_idx)) return false;
            first_row_ = places_.begin_of(place_.expert_idx);
        }
        const uint32_t idx_in_expert = token_idx - expert_begin_;
        const ExpertTiles<Config> tiles(expert_end_ - expert_begin_);
        set_destination(token, place_.pool_block_idx, tiles, idx_in_expert);
        token.source = {0, first_row_ + idx_in_expert, 0};  //~ local_source
        return true;
    }

 private:
    const TokenPlaces<Config>& places_;
    uint32_t first_row_ = 0;  // of the expert there
};

// All threads of warps 0 .. num_dispatch_warps - 1. `shared_memory`: start of Config::Smem.
//
// CTAs come to the gather when their blocks are done. The last one cleans up for all of them. A
// later call starts when this kernel has ended, so no CTA waits for the clean-up.
//
// After an abort both steps are skipped, but the named barrier shared with other roles is still
// passed. Calls launched behind this one find that the rank gave up (ExpertCounts::read_given).
template <class Config, class PullPolicy, class Publish>
__device__ void bring_local_tokens(const KernelArgs& args, uint32_t shared_memory,
                                   const Publish& publish) {
    const RankBuffers<Config> work_space(args);
    const TokenPlaces<Config> places(args);
    const SymmBuffer<Config> local = places.local();
    const uint32_t cta_idx = blockIdx.x;
    const uint32_t thread_idx = threadIdx.x;
    const uint32_t warp_idx = ptx::warp_idx();
    Waiter waiter(args);
    DispatchBarriers<Config> barriers(work_space, thread_idx, waiter);
    ExpertCounts<Config> counts;

    Tracer<Config> trace(args, TraceTrack::dispatch, 0);
    trace.mark(TraceStep::await_counts);
    if (counts.fetch(args, local, waiter)) {
        if (cta_idx == 0 && warp_idx == 0) tell_host<Config>(args, counts);
        trace.mark(TraceStep::pull);
        if (pulls_tokens<Config>(warp_idx)) {
            pull_tokens<Config, PullPolicy, LocalWalk<Config>>(
                places, counts, cta_idx, warp_idx,
                shared_memory + Config::Smem::pull_buffers_offset +
                    warp_idx * Config::Smem::pull_buffers_stride,
                shared_memory + Config::Smem::pull_barriers_offset +
                    warp_idx * Config::Smem::pull_barriers_stride,
                waiter);
        } else {
            publish(local, waiter);
        }
    }
    trace.mark(TraceStep::await_compute);
    sync_compute_done<Config>(waiter);  //~ local_blocks_done
    if (barriers.come_to_gather()) {    //~ gather_to_clean_up
        trace.mark(TraceStep::clean_up);
        clean_up_blocks(local, counts, counts.num_pool_blocks_in_use(), thread_idx);
    }
    if (waiter.aborted() && thread_idx == 0) end_gathers(local.grid_gather_counter());
    trace.mark(TraceStep::end);
    trace.last_anchor();
}

}  // namespace deep_moe
