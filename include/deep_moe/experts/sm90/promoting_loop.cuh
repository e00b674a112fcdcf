// The products of one block with weights that are not decoded: D[256 weight rows][tokens], half of
// the rows in each of two warpgroups, as two times 64. Both operands stay in shared memory.
//
// The tensor core's sums are those of one k-block only. Ordinary registers add them up, times the
// scale of the k-block's weights. So weights have a scale for every 128 x 128. FP8 products keep
// few bits below the largest one; none of these is lost over the whole K.
//
// Tokens may have scales for each k-block (Weights::promotes_token_scales), and then Linear2's
// tokens have, too. They are multiplied in at the same place, and nothing is rescaled.
//
// In tiles of up to 88 rows both times 64 have products of their own: while the sums of one are
// added, the tensor core multiplies the other. Wider tiles have registers for one set only, and the
// tensor core has the other warpgroup's products while this one's are added.
//
// No product is under way from one k-block to the next: ptxas would serialize them all (C7514), for
// it does not follow round the loop which accumulators are complete. Meanwhile the tensor core has
// the other warpgroup's.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/operand_descriptor.cuh"
#include "deep_moe/experts/sm90/rescaler.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/ptx/wgmma.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm90 {

// One thread's walk through the stages; all threads of a warpgroup make it together.
template <class Config>
class PromotingLoop {
    using Ring = RingPosition<Config::num_stages>;
    static constexpr uint32_t rows_per_half = 64;
    static constexpr uint32_t part_bytes = num_row_halves * rows_per_half * Config::block_k;
    static constexpr uint32_t max_rows_of_two_sets = 88;
    static constexpr uint32_t num_sets = Config::block_m <= max_rows_of_two_sets ? 2 : 1;
    static constexpr bool promotes_token_scales = Config::Weights::promotes_token_scales;

 public:
    __device__ PromotingLoop(const SharedMemory<Config>& smem, const MathThread<Config>& thread,
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
        float sets[num_sets][num_rows / 2];
        float (&upper)[num_rows / 2] = sets[0];
        float (&lower)[num_rows / 2] = sets[num_sets - 1];
#pragma unroll
        for (uint32_t i = 0; i < num_rows / 2; ++i) sums[0][i] = sums[1][i] = 0.0f;
        stage_wait_.reset();
        bool may_change_scale = false;
        if constexpr (!promotes_token_scales) {
            may_change_scale = changes_scale(smem_, ring_.stage);
        }
        uint32_t stage = ptx::uniform(enter_stage());
#pragma unroll 1
        for (uint32_t k_block_idx = 0;;) {
            multiply<0>(upper, stage);
            if constexpr (num_sets == 2) multiply<1>(lower, stage);
            // Loaded here and needed at the end, so no thread waits for the load.
            const bool next_is_loaded =
                ptx::mbarrier_test_wait_parity(smem_.full_barriers(ring_.stage), ring_.parity);
            // Behind a wait ptxas takes the address for divergent, and then copies all 32 words of
            // descriptors to uniform registers. So the address is made uniform before.
            const uint32_t next_stage = ptx::uniform(ring_.stage);
            const float2 scales = load_scales(stage);
            if constexpr (!promotes_token_scales) {
                if (k_block_idx > 0 && may_change_scale && changes_scale(smem_, stage)) {
                    rescale(smem_, stage, sums[0]);
                    rescale(smem_, stage, sums[1]);  //~ promoted_rescaled
                }
            }
            ptx::wgmma_wait_group<num_sets - 1>();  //~ upper_complete
            promote(sums[0], upper, scales, stage);
            if constexpr (num_sets == 1) multiply<1>(lower, stage);
            ptx::wgmma_wait_group<0>();  //~ lower_complete
            if constexpr (!promotes_token_scales) release(stage);
            promote(sums[1], lower, scales, stage);
            if constexpr (promotes_token_scales) {
                __syncwarp();  //~ token_scales_read
                release(stage);
            }
            if (++k_block_idx == num_k_blocks) return;
            stage_wait_.start();
            if (!next_is_loaded) await_stage();  //~ promoted_stage_awaited
            stage_wait_.stop();
            ring_.advance();
            stage = next_stage;
        }
    }

    // In the last run, for stages behind the first. For traces.
    __device__ uint32_t waited_ticks() const { return stage_wait_.ticks(); }

 private:
    __device__ __forceinline__ uint32_t enter_stage() {
        const uint32_t stage = ring_.stage;
        ring_.advance();
        return stage;
    }

    // Starts the products of 64 of the warpgroup's rows in a stage, as one group.
    template <uint32_t row_half, uint32_t num_accumulators>
    __device__ __forceinline__ void multiply(float (&products)[num_accumulators], uint32_t stage) {
        const uint32_t weights = operand_descriptor_low<Config>(
            smem_.weight_blocks(stage) + warpgroup_idx_ * part_bytes +
            row_half * rows_per_half * Config::block_k);
        const uint32_t tokens = operand_descriptor_low<Config>(smem_.activations(stage));
        ptx::wgmma_keep_order(products);
        ptx::wgmma_fence();  //~ promoted_fence
#pragma unroll
        for (uint32_t i = 0; i < Config::block_k / mma_bytes; ++i) {
            ptx::wgmma_m64k32_f32_e4m3_e4m3(products,
                                            operand_descriptor(weights + i * (mma_bytes >> 4)),
                                            operand_descriptor(tokens + i * (mma_bytes >> 4)),
                                            i > 0);  //~ promoted_wgmma
        }
        ptx::wgmma_commit_group();
    }

    // Of the warpgroup's weights in a stage: of the rows of h = 0 and those of h = 1.
    __device__ __forceinline__ float2 load_scales(uint32_t stage) const {
        return ptx::ld_shared_f32x2(smem_.weight_scales(stage) + warpgroup_idx_ * sizeof(float2));
    }

    template <uint32_t num_accumulators>
    __device__ __forceinline__ void promote(float (&sums)[num_accumulators],
                                            float (&products)[num_accumulators], float2 scales,
                                            uint32_t stage) const {
        ptx::wgmma_keep_order(products);
        if constexpr (promotes_token_scales) {
            const uint32_t token_scales =
                smem_.token_scales(stage) + thread_idx_ % 4 * sizeof(float2);
#pragma unroll
            for (uint32_t i = 0; i < num_accumulators; i += 4) {
                const float2 of_two =
                    ptx::ld_shared_f32x2(token_scales + i / 4 * 8 * sizeof(float));
                //~ token_scale_promoted
                sums[i] = fmaf(products[i], scales.x * of_two.x, sums[i]);
                sums[i + 1] = fmaf(products[i + 1], scales.x * of_two.y, sums[i + 1]);
                sums[i + 2] = fmaf(products[i + 2], scales.y * of_two.x, sums[i + 2]);
                sums[i + 3] = fmaf(products[i + 3], scales.y * of_two.y, sums[i + 3]);
            }
        } else {
#pragma unroll
            for (uint32_t i = 0; i < num_accumulators; ++i) {
                sums[i] = fmaf(products[i], i / 2 % 2 == 0 ? scales.x : scales.y, sums[i]);
            }
        }
    }

    // Every warp for itself, when it has read the scales and its products are complete.
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
