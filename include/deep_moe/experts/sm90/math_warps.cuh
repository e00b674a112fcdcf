// The warps that do the arithmetic: for each block the products, then the epilogue of its phase.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/release_rows.cuh"
#include "deep_moe/experts/sm90/block_header.cuh"
#include "deep_moe/experts/sm90/kernel_args.cuh"
#include "deep_moe/experts/sm90/l1_epilogue.cuh"
#include "deep_moe/experts/sm90/l1_publisher.cuh"
#include "deep_moe/experts/sm90/l2_epilogue.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/experts/sm90/weight_loader.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm90 {

template <class Config>
class MathWarps {
    using Thread = MathThread<Config>;

 public:
    __device__ MathWarps(const KernelArgs& args, const SharedMemory<Config>& smem, Waiter& waiter)
        : args_(args),
          smem_(smem),
          waiter_(waiter),
          main_loop_(smem, Thread::here(), waiter),
          trace_(args, TraceTrack::math, Config::num_threads - Thread::num_threads) {}

    // The warps meet on barriers inside a block, so they leave together or not at all.
    __device__ void run() {
        clear_own_maxima(turn());
        for (;; ++block_idx_) {
            trace_.mark(TraceStep::await_block, main_loop_.waited_ticks());
            main_loop_.await_stage();
            if (!Thread::here().vote(waiter_)) return;
            // No warp reads the maxima of the block before any more, and the next block begins
            // behind another vote.
            clear_own_maxima(turn() ^ 1);  //~ maxima_cleared
            const BlockHeader block = load_header<Config>(header_address());
            if (block.num_rows == 0) {
                trace_.mark(TraceStep::end);
                return;
            }
            trace_.mark(LinearOf<Config>(block.phase).main_loop_step(), block.weight_block_row_idx,
                        block.num_valid_rows);
            if (!run_block<Config::min_block_m>(block)) return;
            __syncwarp();  //~ warp_stored
            if (Thread::here().lane_idx() == 0) {
                ptx::mbarrier_arrive(smem_.stored_barriers(slot()));
            }
        }
    }

 private:
    // The products are as wide as the block has rows, which an instruction has to know. So there is
    // a main loop for each size of m-block, and an epilogue of its own behind it.
    template <uint32_t num_rows>
    __device__ __forceinline__ bool run_block(const BlockHeader& begun) {
        if constexpr (num_rows < Config::block_m) {
            if (begun.num_rows > num_rows) {
                return run_block<num_rows + Config::block_m_step>(begun);
            }
        }
        Accumulators<num_rows> accumulators;
        main_loop_.template run<num_rows>(LinearOf<Config>(begun.phase).num_k_blocks(),
                                          accumulators);
        trace_.mark(LinearOf<Config>(begun.phase).epilogue_step());
        // Read again, because keeping it would take registers from the main loop.
        const BlockHeader block = load_header<Config>(header_address());
        const Thread thread = Thread::here();
        const RowValues factors = row_factors(thread);
        const RowValues biases = row_biases(thread);
        const RankBuffers<Config> ranks(args_);
        // Then no block needs its results.
        const bool is_idle = LinearOf<Config>(block.phase).is_idle(block.n_block_idx);
        if (block.phase == Phase::linear1) {
            if (is_idle) return true;  //~ idle_linear1
            return L1Epilogue<Config, num_rows>(smem_, ranks.local(), thread, slot(), turn())
                .run(block, factors, biases, accumulators, waiter_);
        } else {
            // A warp that gave up has not waited for the destinations, so it must not store.
            if (waiter_.aborted()) return true;
            if (is_idle) return true;  //~ idle_linear2
            L2Epilogue<Config, num_rows>(smem_, thread, slot())
                .run(block, factors, biases, accumulators);
            return true;
        }
    }

    // Where Linear1's output has scales.
    __device__ __forceinline__ void clear_own_maxima(uint32_t turn) const {
        if constexpr (Config::Weights::has_token_scales) {
            clear_maxima(smem_, Thread::here(), turn);
        }
    }

    // Where weights have none, their scales, if any, are in the sums already.
    __device__ __forceinline__ RowValues row_factors(const Thread& thread) const {
        if constexpr (Config::Weights::has_row_factors) {
            return load_row_values(smem_.row_factors(slot()), thread);
        } else {
            return {{{1.0f, 1.0f}, {1.0f, 1.0f}}};
        }
    }
    __device__ __forceinline__ RowValues row_biases(const Thread& thread) const {
        if constexpr (Config::Biases::exist) {
            return load_row_values(smem_.biases(slot()), thread);
        } else {
            return {};
        }
    }

    __device__ uint32_t slot() const { return block_idx_ % Config::num_block_slots; }  //~ math_slot
    __device__ uint32_t header_address() const { return smem_.block_headers(slot()); }
    // Which maxima a block uses: they alternate.
    __device__ uint32_t turn() const { return block_idx_ % 2; }

    const KernelArgs& args_;
    const SharedMemory<Config>& smem_;
    Waiter& waiter_;
    typename Config::Weights::template MainLoop<Config> main_loop_;
    Tracer<Config> trace_;
    uint32_t block_idx_ = 0;  // of this CTA, in the order of the list
};

}  // namespace deep_moe::sm90
