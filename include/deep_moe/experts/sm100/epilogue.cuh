// The warps that finish blocks: wait for an accumulator, hand it to the epilogue of its phase.
#pragma once

#include "deep_moe/experts/block_walk.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/release_rows.cuh"
#include "deep_moe/experts/sm100/epilogue_warp.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/l1_epilogue.cuh"
#include "deep_moe/experts/sm100/l2_epilogue.cuh"
#include "deep_moe/experts/sm100/pair_claims.cuh"
#include "deep_moe/experts/sm100/row_biases.cuh"
#include "deep_moe/experts/sm100/row_factors.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/experts/wait_for_tokens.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/token_places.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/tcgen05.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm100 {

template <class Config>
__device__ void run_epilogues(const KernelArgs& args, const SharedMemory<Config>& smem,
                              const TokenPlaces<Config>& places, uint32_t epilogue_warp_idx,
                              uint32_t tmem, Waiter& waiter) {
    const SymmBuffer<Config> local = places.local();
    const EpilogueWarp<Config> warp{epilogue_warp_idx, ptx::lane_idx()};
    const L1Epilogue<Config> l1_epilogue(args, smem, local, warp);
    const L2Epilogue<Config> l2_epilogue(smem, places, warp);

    // The warps meet on barriers inside a block, so they leave together or not at all. The vote
    // before a block also protects the staging tiles: no warp reads the last block's any more.
    const auto all_arrived = [&](bool arrived) {
        return waiter.follow(
            ptx::bar_red_and(NamedBarrier::epilogue, EpilogueWarp<Config>::num_threads, arrived));
    };

    Tracer<Config> trace(args, TraceTrack::epilogue,
                         Config::num_threads - Config::num_epilogue_warps * warp_size);
    trace.mark(TraceStep::await_counts);
    ExpertCounts<Config> counts;
    counts.count_shared(args);
    if (!all_arrived(counts.fetch(args, local, waiter))) return;
    BlockWalk<Config> walk(counts, blockIdx.x);

    PairFollower<Config> pairs(smem);
    RingPosition<Config::num_tmem_stages> accumulators;
    for (;; accumulators.advance()) {
        trace.mark(TraceStep::await_block);
        Block block;
        const bool is_told = pairs.follow(walk, waiter);
        const bool exists = is_told && walk.find(block);
        if (!exists) {
            if (!all_arrived(is_told)) return;
            if (epilogue_warp_idx == 0) pairs.release();
            break;
        }
        const LinearOf<Config> linear(block.phase);
        const RowBiases biases = load_row_biases(args, linear, block, warp);
        const RowFactors factors = load_row_factors(args, linear, block, warp);
        // The epilogues read routing weights and destinations. The commit behind the MMAs does not
        // hand these over: it only says that the MMAs are done. One warp acquires them for all, and
        // their way from L2 is over before the MMAs are.
        //~ block_arrived
        const bool arrived = epilogue_warp_idx != 0 || L1Epilogue<Config>::is_idle(block) ||
                             wait_for_dispatch(local, block, waiter);
        if (!all_arrived(arrived)) return;
        if (epilogue_warp_idx == 0) pairs.release();
        pairs.advance();
        LaneToken first_token;
        typename L2Epilogue<Config>::Sources sources;
        if (block.phase == Phase::linear1) {
            first_token = l1_epilogue.load_first_token(block);
        } else {
            sources = l2_epilogue.find_sources(block);
        }
        if (!all_arrived(waiter.warp_mbarrier(WaitSite::accumulator_full,
                                              smem.tmem_full_barriers(accumulators.stage),
                                              accumulators.parity))) {
            return;
        }
        ptx::tcgen05_fence_after_thread_sync();  //~ accumulator_fence

        trace.mark(linear.epilogue_step(), linear.weight_block_row(block), block.num_valid_rows);
        const uint32_t first_lane = warp.quadrant() * 32;
        const uint32_t column = Config::Tmem::accumulator_column +
                                accumulators.stage * Config::Tmem::accumulator_stride;
        const Accumulator accumulator{tmem + (first_lane << 16) + column,
                                      smem.of_even_cta().tmem_empty_barriers(accumulators.stage)};
        if (block.phase == Phase::linear1) {
            l1_epilogue.run(block, accumulator, factors, biases, first_token);
        } else {
            l2_epilogue.run(block, accumulator, factors, biases, sources);
            if constexpr (PoolRing<Config>::wraps) {
                // The products are complete, so both CTAs' copies are. With biases every warp reads
                // its rows' routing weights; behind the barrier all have.
                if (block.is_reused) {
                    warp.sync_all();  //~ routing_weights_read
                    // Linear1's epilogues have read routing weights there. The loaders have
                    // acquired that, but the commit does not hand it over: this is over at once.
                    //~ linear1_acquired
                    if (epilogue_warp_idx == 0 && wait_for_tokens(local, block, waiter)) {
                        release_rows(local, block);
                    }
                }
            }
        }
    }
    trace.mark(TraceStep::end);
}

}  // namespace deep_moe::sm100
