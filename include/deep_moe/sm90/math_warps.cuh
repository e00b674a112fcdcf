// The warps that do the arithmetic: for each block the products, then the epilogue of its phase.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/ring_position.cuh"
#include "deep_moe/sm90/block_header.cuh"
#include "deep_moe/sm90/l1_epilogue.cuh"
#include "deep_moe/sm90/l2_epilogue.cuh"
#include "deep_moe/sm90/main_loop.cuh"
#include "deep_moe/sm90/math_warp.cuh"
#include "deep_moe/sm90/shared_memory.cuh"
#include "deep_moe/sm90/weight_loader.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// wgmma's N is part of the instruction. A block with few valid tokens runs with the smallest of
// these widths that holds them; each is a copy of the main loop and both epilogues.
template <uint32_t...>
struct TileWidths {};

template <class Config>
class MathWarps {
    using Thread = MathThread<Config>;

 public:
    __device__ MathWarps(const KernelArgs& args, const SharedMemory<Config>& smem, Waiter& waiter)
        : args_(args), smem_(smem), waiter_(waiter), main_loop_(smem, Thread::here(), waiter) {}

    // The warps meet on barriers inside a block, so they leave together or not at all.
    __device__ void run() {
        clear_maxima(smem_, Thread::here(), turn_);
        RingPosition<SharedMemory<Config>::num_block_headers> headers;
        for (;; headers.advance(), turn_ ^= 1) {
            main_loop_.await_stage();
            if (!Thread::here().vote(waiter_)) return;
            const BlockHeader block = load_header(smem_.block_header(headers.stage));
            if (block.num_valid_rows == 0) return;
            const bool going = block.phase == Phase::linear1
                                   ? run_block<Phase::linear1>(block, headers.stage, Widths{})
                                   : run_block<Phase::linear2>(block, headers.stage, Widths{});
            if (!going) return;
        }
    }

 private:
    template <Phase phase, uint32_t width, uint32_t... wider>
    __device__ __forceinline__ bool run_block(const BlockHeader& header, uint32_t header_idx,
                                              TileWidths<width, wider...>) {
        if constexpr (width < Config::block_m) {
            if (header.num_valid_rows > width) {
                return run_block<phase>(header, header_idx, TileWidths<wider...>{});
            }
        }
        Accumulators<width> accumulators;
        main_loop_.template run<phase, width>(accumulators);
        // Read again, because keeping it would take registers from the main loop.
        const BlockHeader block = load_header(smem_.block_header(header_idx));
        const Thread thread = Thread::here();
        const RowFactors rows = load_row_factors(row_factors<Config>(args_, block), thread);
        const RankBuffers<Config> ranks(args_);
        if constexpr (phase == Phase::linear1) {
            return L1Epilogue<Config>(smem_, ranks.local(), thread, turn_)
                .template run<width>(block, rows, accumulators, waiter_);
        } else {
            return L2Epilogue<Config>(smem_, ranks, thread, turn_)
                .template run<width>(block, rows, accumulators, waiter_);
        }
    }

    static constexpr auto widths() {
        constexpr uint32_t n = Config::block_m;
        if constexpr (n <= 16) {
            return TileWidths<n>{};
        } else if constexpr (n <= 64) {
            return TileWidths<n / 2, n>{};
        } else {
            return TileWidths<32, 64, n>{};
        }
    }
    using Widths = decltype(widths());

    const KernelArgs& args_;
    const SharedMemory<Config>& smem_;
    Waiter& waiter_;
    MainLoop<Config> main_loop_;
    uint32_t turn_ = 0;  // alternates: which exchange buffers of the epilogues a block uses
};

}  // namespace deep_moe::sm90
