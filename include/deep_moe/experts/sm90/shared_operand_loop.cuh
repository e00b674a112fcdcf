// The products of one block with weights that are taken as they lie: D[256 weight rows][tokens],
// half of the rows in each of two warpgroups, as two times 64. Both operands stay in shared memory,
// and nothing touches the accumulators before the whole K is added up, but where a token's scales
// differ from k-block to k-block (rescaler.cuh). So a k-block's products are started while those of
// the k-block before are under way, and a stage is given back one k-block later than it was
// entered. FP8 products accumulate in the tensor core over the whole K: nothing is promoted.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/operand_descriptor.cuh"
#include "deep_moe/experts/sm90/rescaler.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/wgmma.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm90 {

// What both operands consist of.
struct Bf16Products {
    static constexpr uint32_t value_bytes = 2;

    template <uint32_t num_accumulators>
    static __device__ __forceinline__ void multiply(float (&sums)[num_accumulators],
                                                    uint64_t weights, uint64_t tokens) {
        ptx::wgmma_m64k16_f32_bf16_bf16(sums, weights, tokens);
    }
};
struct E4m3Products {
    static constexpr uint32_t value_bytes = 1;

    template <uint32_t num_accumulators>
    static __device__ __forceinline__ void multiply(float (&sums)[num_accumulators],
                                                    uint64_t weights, uint64_t tokens) {
        ptx::wgmma_m64k32_f32_e4m3_e4m3(sums, weights, tokens, true);
    }
};

// One thread's walk through the stages; all threads of a warpgroup make it together.
template <class Config, class Products>
class SharedOperandLoop {
    using Ring = RingPosition<Config::num_stages>;
    static constexpr uint32_t rows_per_half = 64;
    static constexpr uint32_t row_bytes = 128;  // of a k-block
    static constexpr uint32_t half_bytes = rows_per_half * row_bytes;
    static_assert(Config::Weights::block_bytes == 2 * num_row_halves * half_bytes);
    static_assert(Config::block_k * Products::value_bytes == row_bytes);

 public:
    __device__ SharedOperandLoop(const SharedMemory<Config>& smem, const MathThread<Config>& thread,
                                 Waiter& waiter)
        : smem_(smem),
          warpgroup_idx_(__shfl_sync(full_warp, thread.warpgroup_idx(), 0)),
          thread_idx_(thread.warpgroup_thread_idx()),
          waiter_(waiter) {}

    // Until the next stage is loaded; false after an abort.
    __device__ __forceinline__ bool await_stage() {
        return waiter_.mbarrier(WaitSite::stage_full, smem_.full_barriers(ring_.stage),
                                ring_.parity);
    }

    // Adds up the whole K of a block of num_rows rows, whose first stage is loaded. After an abort
    // the products are of whatever the stages hold, so that the warps stay together up to the vote
    // in the epilogue.
    template <uint32_t num_rows>
    __device__ __forceinline__ void run(uint32_t num_k_blocks, Accumulators<num_rows>& sums) {
#pragma unroll
        for (uint32_t i = 0; i < num_rows / 2; ++i) sums[0][i] = sums[1][i] = 0.0f;
        stage_wait_.reset();
        uint32_t stage = enter_stage();
        bool may_change_scale = false;
        if constexpr (has_token_factors<Config>) may_change_scale = changes_scale(smem_, stage);
#pragma unroll 1
        for (uint32_t k_block_idx = 0;;) {
            // Loaded here and needed at the end, so no thread waits for the load.
            const bool next_is_loaded =
                ptx::mbarrier_test_wait_parity(smem_.full_barriers(ring_.stage), ring_.parity);
            multiply(sums, stage);
            ptx::wgmma_wait_group<1>();                               //~ shared_groups_in_flight
            if (k_block_idx > 0) release(Ring::stage_before(stage));  //~ shared_stage_released
            if (++k_block_idx == num_k_blocks) break;
            stage_wait_.start();
            if (!next_is_loaded) await_stage();  //~ shared_stage_awaited
            stage_wait_.stop();
            stage = enter_stage();
            if constexpr (has_token_factors<Config>) {
                if (may_change_scale && changes_scale(smem_, stage)) {
                    ptx::wgmma_wait_group<0>();  //~ shared_rescale_wait
                    rescale(smem_, stage, sums[0]);
                    rescale(smem_, stage, sums[1]);  //~ shared_rescaled
                }
            }
        }
        ptx::wgmma_wait_group<0>();  //~ shared_sums_complete
        ptx::wgmma_keep_order(sums[0]);
        ptx::wgmma_keep_order(sums[1]);
        release(stage);
    }

    // In the last run, for stages behind the first. For traces.
    __device__ uint32_t waited_ticks() const { return stage_wait_.ticks(); }

 private:
    __device__ __forceinline__ uint32_t enter_stage() {
        const uint32_t stage = ring_.stage;
        ring_.advance();
        return stage;
    }

    // Starts the products of the warpgroup's 128 rows in a stage, as one group.
    template <uint32_t num_accumulators>
    __device__ __forceinline__ void multiply(float (&sums)[num_row_halves][num_accumulators],
                                             uint32_t stage) {
        const uint32_t weights = operand_descriptor_low<Config>(
            smem_.weight_blocks(stage) + warpgroup_idx_ * num_row_halves * half_bytes);
        const uint32_t tokens = operand_descriptor_low<Config>(smem_.activations(stage));
        ptx::wgmma_fence();  //~ shared_fence
#pragma unroll
        for (uint32_t half = 0; half < num_row_halves; ++half) {
#pragma unroll
            for (uint32_t offset = 0; offset < row_bytes; offset += mma_bytes) {
                Products::multiply(
                    sums[half], operand_descriptor(weights + ((half * half_bytes + offset) >> 4)),
                    operand_descriptor(tokens + (offset >> 4)));  //~ shared_wgmma
            }
        }
        ptx::wgmma_commit_group();
    }

    // Every warp for itself: the tensor core may be done with one warp's rows before another's.
    __device__ __forceinline__ void release(uint32_t stage) {
        smem_.release_stage(stage, thread_idx_ % warp_size);
    }

    const SharedMemory<Config>& smem_;
    uint32_t warpgroup_idx_;
    uint32_t thread_idx_;  // in the warpgroup
    Waiter& waiter_;
    Ring ring_;
    TraceStopwatch<Config> stage_wait_;
};

}  // namespace deep_moe::sm90
