// The warps that finish blocks: wait for an accumulator, hand it to the epilogue of its phase.
#pragma once

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/tcgen05.cuh"
#include "deep_moe/ring_position.cuh"
#include "deep_moe/roles/wait_for_tokens.cuh"
#include "deep_moe/scheduler.cuh"
#include "deep_moe/sm100/epilogue_warp.cuh"
#include "deep_moe/sm100/l1_epilogue.cuh"
#include "deep_moe/sm100/l2_epilogue.cuh"
#include "deep_moe/sm100/shared_memory.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace.cuh"

namespace deep_moe::sm100 {

template <class Config>
__device__ void finish_blocks(const KernelArgs& args, const SharedMemory<Config>& smem,
                              const RankBuffers<Config>& ranks, uint32_t epilogue_warp_idx,
                              uint32_t tmem, Waiter& waiter) {
    const SymmBuffer<Config> local = ranks.local();
    const EpilogueWarp<Config> warp{epilogue_warp_idx, ptx::lane_idx()};
    const L1Epilogue<Config> l1_epilogue(args, smem, local, warp);
    const L2Epilogue<Config> l2_epilogue(smem, ranks, warp);

    // The warps meet on barriers inside a block, so they leave together or not at all. The vote
    // before a block is also what the staging tiles need: nobody reads the last block's any more.
    const auto all_arrived = [&](bool arrived) {
        return waiter.follow(
            ptx::bar_red_and(NamedBarrier::epilogue, EpilogueWarp<Config>::num_threads, arrived));
    };

    Tracer<Config> trace(args, TraceTrack::epilogue,
                         Config::num_threads - Config::num_epilogue_warps * warp_size);
    trace.mark(TraceStep::await_counts);
    Scheduler<Config> scheduler(local, blockIdx.x);
    if (!all_arrived(scheduler.fetch_expert_counts(waiter))) return;

    RingPosition<Config::num_tmem_stages> accumulators;
    for (Block block; scheduler.next(block); accumulators.advance()) {
        trace.mark(TraceStep::await_block);
        // The epilogues read routing weights and destinations, which the commit behind the MMAs
        // does not hand over: it only says that the MMAs are done. One warp acquires them for all.
        const bool arrived =
            (epilogue_warp_idx != 0 || wait_for_dispatch(local, block, waiter)) &&
            waiter.warp_mbarrier(WaitSite::accumulator_full,
                                 smem.tmem_full_barrier(accumulators.stage), accumulators.parity);
        if (!all_arrived(arrived)) return;
        ptx::tcgen05_fence_after_thread_sync();

        trace.mark(block.phase == Phase::linear1 ? TraceStep::l1_epilogue : TraceStep::l2_epilogue,
                   weight_block_row<Config>(block), block.num_valid_rows);
        const uint32_t first_lane = warp.quadrant() * 32;
        const uint32_t column =
            Config::Tmem::accumulator_column + accumulators.stage * Config::block_m;
        const Accumulator accumulator{tmem + (first_lane << 16) + column,
                                      in_even_cta(smem.tmem_empty_barrier(accumulators.stage))};
        if (block.phase == Phase::linear1) {
            l1_epilogue.run(block, accumulator);
        } else {
            l2_epilogue.run(block, accumulator);
        }
    }
    trace.mark(TraceStep::end);
}

}  // namespace deep_moe::sm100
