// The warp that drives the tensor cores of both CTAs: D[weight rows][tokens] = weights x tokens.
// Operands are swapped: the 256 rows of one MMA are weights, which are always present, and its
// run-time N is the number of tokens, which may be small.
#pragma once

#include "deep_moe/experts/block_walk.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/experts/sm100/descriptors.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/pair_claims.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/tcgen05.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/named_barriers.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm100 {

// N of the 2-CTA MMA comes in steps of 16; the even CTA holds the first half of the tokens.
__device__ __forceinline__ uint32_t num_mma_tokens(const Block& block) {
    return align_up(block.num_valid_rows, 16u);  //~ mma_tokens
}

// The tiles of the first stage; those of the others are as far apart as in SharedMemory.
template <class Config>
struct StageDescriptors {
    using Smem = typename Config::Smem;

    __device__ explicit StageDescriptors(const SharedMemory<Config>& smem)
        : weights(operand_descriptor(smem.weights(0))),
          activations(operand_descriptor(smem.activations(0))) {
        if constexpr (Config::Weights::has_scales) {
            weight_sf = scale_descriptor(smem.weight_sf(0));
            activation_sf = scale_descriptor(smem.activation_sf(0));
        }
    }

    uint64_t weights;
    uint64_t activations;
    uint64_t weight_sf = 0;
    uint64_t activation_sf = 0;
};

// One k-block without scales: MMAs only. One thread.
template <class Config>
__device__ __forceinline__ void multiply_plain_k_block(const StageDescriptors<Config>& first,
                                                       uint32_t stage, uint32_t accumulator,
                                                       uint32_t num_tokens, bool is_first) {
    using Smem = typename Config::Smem;
    const uint64_t weights = advance(first.weights, stage, Smem::weights_stride);
    const uint64_t tokens = advance(first.activations, stage, Smem::activations_stride);
#pragma unroll
    for (uint32_t i = 0; i < mmas_per_k_block; ++i) {
        const uint64_t a = advance(weights, i, mma_k_bytes);
        const uint64_t b = advance(tokens, i, mma_k_bytes);
        const bool accumulates = !is_first || i > 0;
        if constexpr (Config::Weights::has_unit_scales) {
            constexpr auto format = static_cast<uint32_t>(cute::UMMA::MXF8F6F4Format::E4M3);
            ptx::tcgen05_mma_cta_group2_f8f6f4(accumulator, a, b,
                                               plain_instruction_descriptor(format, num_tokens),
                                               accumulates);  //~ plain_fp8_mma
        } else {
            constexpr auto format = static_cast<uint32_t>(cute::UMMA::F16F32Format::BF16);
            ptx::tcgen05_mma_cta_group2_f16(accumulator, a, b,
                                            plain_instruction_descriptor(format, num_tokens),
                                            accumulates);  //~ bf16_mma
        }
    }
}

// One k-block of decoded weights, which lie in tensor memory from `weights` on. One thread.
template <class Config>
__device__ __forceinline__ void multiply_decoded_k_block(const StageDescriptors<Config>& first,
                                                         uint32_t stage, uint32_t weights,
                                                         uint32_t accumulator, uint32_t num_tokens,
                                                         bool is_first) {
    constexpr auto format = static_cast<uint32_t>(cute::UMMA::F16F32Format::BF16);
    const uint64_t tokens = advance(first.activations, stage, Config::Smem::activations_stride);
#pragma unroll
    for (uint32_t i = 0; i < mmas_per_k_block; ++i) {
        ptx::tcgen05_mma_cta_group2_f16_tmem_a(
            accumulator, weights + i * (mma_k_bytes / sizeof(uint32_t)),
            advance(tokens, i, mma_k_bytes), plain_instruction_descriptor(format, num_tokens),
            !is_first || i > 0);  //~ decoded_mma
    }
}

// One k-block: both operands' scales to TMEM, then one MMA per scale byte or, of packed E2M1, per
// scale word. tcgen05 executes one thread's copies and MMAs in the order they are issued. One
// thread.
template <class Config>
__device__ __forceinline__ void multiply_scaled_k_block(const StageDescriptors<Config>& first,
                                                        uint32_t stage, uint32_t tmem,
                                                        uint32_t accumulator, uint32_t num_tokens,
                                                        bool is_first) {
    using Smem = typename Config::Smem;
    const uint32_t token_sf = tmem + Config::Tmem::activation_sf_column;
    const uint32_t weight_sf = tmem + Config::Tmem::weight_sf_column;
    constexpr uint32_t bytes_per_copy = scale_rows_per_copy * sizeof(uint32_t);
    constexpr uint32_t num_words = Config::Weights::scale_words_per_k_block;
    const uint64_t activation_words =
        advance(first.activation_sf, stage, Smem::activation_sf_stride);
#pragma unroll
    for (uint32_t i = 0; i < num_words * Smem::activation_sf_dim2 / scale_rows_per_copy; ++i) {
        ptx::tcgen05_cp_cta_group2_32x128b_warpx4(token_sf + i * scale_columns_per_copy,
                                                  advance(activation_words, i, bytes_per_copy));
    }
    if constexpr (!Config::Weights::has_unit_scales) {
        const uint64_t weight_words = advance(first.weight_sf, stage, Smem::weight_sf_stride);
#pragma unroll
        for (uint32_t i = 0; i < num_words; ++i) {
            ptx::tcgen05_cp_cta_group2_32x128b_warpx4(weight_sf + i * scale_columns_per_copy,
                                                      advance(weight_words, i, bytes_per_copy));
        }
    }

    const uint64_t weights = advance(first.weights, stage, Smem::weights_stride);
    const uint64_t tokens = advance(first.activations, stage, Smem::activations_stride);
#pragma unroll
    for (uint32_t i = 0; i < mmas_per_k_block; ++i) {
        const uint64_t a = advance(weights, i, mma_k_bytes);
        const uint64_t b = advance(tokens, i, mma_k_bytes);
        const bool accumulates = !is_first || i > 0;
        if constexpr (num_words == 1) {
            //~ mma
            ptx::tcgen05_mma_cta_group2_mxf8f6f4_block_scale(
                accumulator, a, b, instruction_descriptor<typename Config::Weights>(num_tokens, i),
                weight_sf, token_sf, accumulates);
        } else {
            static_assert(num_words == mmas_per_k_block, "a word of scales for each MMA");
            //~ fp4_mma
            ptx::tcgen05_mma_cta_group2_mxf4nvf4_block16(
                accumulator, a, b, fp4_instruction_descriptor(num_tokens),
                weight_sf + i * Config::Tmem::weight_sf_stride,
                token_sf + i * Config::Tmem::activation_sf_stride, accumulates);
        }
    }
}

// One k-block of a phase, with scales where its weights and tokens have any. One thread.
template <class Config>
__device__ __forceinline__ void multiply_k_block(Phase phase, const StageDescriptors<Config>& first,
                                                 uint32_t stage, uint32_t tmem,
                                                 uint32_t accumulator, uint32_t num_tokens,
                                                 bool is_first) {
    using Weights = typename Config::Weights;
    const bool is_plain =
        !Weights::has_scales || (Weights::has_unit_scales && phase == Phase::linear1);
    if (is_plain) {
        multiply_plain_k_block(first, stage, accumulator, num_tokens, is_first);
    } else if constexpr (Weights::has_scales) {
        multiply_scaled_k_block(first, stage, tmem, accumulator, num_tokens, is_first);
    }
}

// Even CTA only. The loop over k-blocks is written to stay in uniform registers.
template <class Config>
__device__ void issue_mmas(const KernelArgs& args, const SharedMemory<Config>& shared_memory,
                           const SymmBuffer<Config>& local, uint32_t tmem, Waiter& waiter) {
    static_assert(Config::block_n == 128 && Config::Smem::activations_dim2 == 128,
                  "an MMA takes 128 weight rows from each CTA, a k-block is 128 bytes of each");
    static_assert(Config::block_m % 16 == 0 && Config::block_m >= 16 && Config::block_m <= 256,
                  "block_m is the N of a 2-CTA MMA: a multiple of 16 up to 256");
    constexpr uint16_t both_ctas = 0b11;

    Tracer<Config> trace(args, TraceTrack::math, (Config::num_dispatch_warps + 2) * warp_size);
    TraceStopwatch<Config> stage_wait;
    trace.mark(TraceStep::await_counts);
    ExpertCounts<Config> counts;
    counts.count_shared(args);
    if (!counts.fetch(args, local, waiter)) return;
    ptx::reconverge(NamedBarrier::mma);
    BlockWalk<Config> walk(counts, blockIdx.x);

    const SharedMemory<Config> smem = shared_memory.uniform();
    const StageDescriptors<Config> descriptors(smem);
    tmem = ptx::uniform(tmem);
    [[maybe_unused]] bool are_unit_scales_there = false;
    RingPosition<Config::num_stages> ring;
    [[maybe_unused]] RingPosition<num_decoded_slots<Config>> decoded;
    RingPosition<Config::num_tmem_stages> accumulators;
    PairFollower<Config> pairs(smem);
    for (Block block; pairs.next(walk, block, waiter); accumulators.advance()) {
        trace.mark(TraceStep::await_block, stage_wait.ticks());
        stage_wait.reset();
        if (!waiter.uniform_mbarrier(WaitSite::accumulator_empty,
                                     smem.tmem_empty_barriers(accumulators.stage),
                                     accumulators.parity ^ 1)) {  //~ mma_accumulator
            return;
        }
        ptx::tcgen05_fence_after_thread_sync();
        if constexpr (Config::Weights::has_unit_scales) {
            // Not before there is a block: its commits cover the copy, and tensor memory is freed
            // behind them. The same lane as below, whose MMAs come behind it.
            if (!are_unit_scales_there && ptx::elect_sync()) {
                ptx::tcgen05_cp_cta_group2_32x128b_warpx4(tmem + Config::Tmem::weight_sf_column,
                                                          descriptors.weight_sf);  //~ unit_scales
            }
            __syncwarp();
            are_unit_scales_there = true;
        }

        //~ mma_column
        const uint32_t accumulator = tmem + Config::Tmem::accumulator_column +
                                     accumulators.stage * Config::Tmem::accumulator_stride;
        const uint32_t num_tokens = ptx::uniform(num_mma_tokens(block));
        const LinearOf<Config> linear(block.phase);
        const uint32_t num_k_blocks = ptx::uniform(linear.num_k_blocks());
        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks; ++k_block_idx) {
            if (k_block_idx > 0) stage_wait.start();
            if (!waiter.uniform_mbarrier(WaitSite::stage_full, smem.full_barriers(ring.stage),
                                         ring.parity)) {
                return;
            }
            if (k_block_idx > 0) {
                stage_wait.stop();
            } else {
                trace.mark(linear.main_loop_step(), linear.weight_block_row(block),
                           block.num_valid_rows);
            }
            ptx::tcgen05_fence_after_thread_sync();  //~ mma_fence
            // The same lane every time: a commit covers the operations of the thread that issues
            // it.
            if (ptx::elect_sync()) {
                if constexpr (Config::Weights::is_decoded) {
                    multiply_decoded_k_block(descriptors, ring.stage,
                                             decoded_slot<Config>(tmem, decoded.stage), accumulator,
                                             num_tokens, k_block_idx == 0);
                } else {
                    multiply_k_block(block.phase, descriptors, ring.stage, tmem, accumulator,
                                     num_tokens, k_block_idx == 0);  //~ multiplied
                }
                ptx::tcgen05_commit_cta_group2_multicast(smem.empty_barriers(ring.stage),
                                                         both_ctas);  //~ committed
            }
            __syncwarp();
            ring.advance();
            if constexpr (Config::Weights::is_decoded) decoded.advance();
        }
        if (ptx::elect_sync()) {
            ptx::tcgen05_commit_cta_group2_multicast(smem.tmem_full_barriers(accumulators.stage),
                                                     both_ctas);  //~ block_committed
        }
        __syncwarp();
    }
    // This await is over at once: it closes the last block's time.
    trace.mark(TraceStep::await_block, stage_wait.ticks());
    trace.mark(TraceStep::end);
}

}  // namespace deep_moe::sm100
