// The products of one block: D[256 weight rows][tokens], half of the rows in each of two
// warpgroups, as two times 64. Weights are decoded into registers just before their product, tokens
// stay in shared memory.
//
// The products of a k-block go in groups of two along K. While the thread decodes the weights of a
// group, the tensor core has up to three others to work on, whose weights are in registers of their
// own. With the widest tiles accumulators leave too few for that: then products go one by one,
// which takes some percent longer. Nothing is promoted: FP8 products accumulate in the tensor core
// over the whole K. How weights are decoded, and to what, a Decoder says
// (weights/<format>/sm90_*_decode.cuh).
//
// ptxas tracks several groups in flight only through straight code. So the one place to wait for
// memory is between two k-blocks; a wait elsewhere makes ptxas serialize all products (C7513).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/operand_descriptor.cuh"
#include "deep_moe/experts/sm90/rescaler.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/wgmma.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm90 {

// A math warpgroup's 128 rows are two products of 64.
constexpr uint32_t num_row_halves = 2;
constexpr uint32_t mma_bytes = 32;  // of each token's K that a product takes

// A thread's part of D for an m-block of so many rows: [64 weight rows][register], in the order of
// ptx/wgmma.cuh.
template <uint32_t num_rows>
using Accumulators = float[num_row_halves][num_rows / 2];

// One thread's walk through the stages; all threads of a warpgroup make it together.
template <class Config, class Decoder>
class MainLoop {
    using Ring = RingPosition<Config::num_stages>;
    static constexpr uint32_t mmas_per_row_half = Decoder::mmas_per_row_half;
    static constexpr uint32_t mmas_per_unit = Decoder::mmas_per_unit;
    static constexpr uint32_t units_per_row_half = mmas_per_row_half / mmas_per_unit;
    static_assert(units_per_row_half == 1 || units_per_row_half == 2);
    static constexpr uint32_t mmas_per_group = Config::num_mmas_per_group;
    using Group = typename Decoder::Fragment[mmas_per_group];
    static constexpr uint32_t num_units_in_registers = 2;
    using Packed = uint4[num_units_in_registers];
    static constexpr uint32_t num_groups_in_registers = 4;

 public:
    __device__ MainLoop(const SharedMemory<Config>& smem, const MathThread<Config>& thread,
                        Waiter& waiter)
        : smem_(smem),
          part_offset_(thread.warpgroup_idx() * Decoder::part_bytes),
          thread_idx_(thread.warpgroup_thread_idx()),
          waiter_(waiter) {}

    // Until the next stage is loaded; false after an abort.
    __device__ __forceinline__ bool await_stage() {
        return waiter_.mbarrier(WaitSite::stage_full, smem_.full_barriers(ring_.stage),
                                ring_.parity);
    }

    // Adds up the whole K of a block of num_rows rows, whose first stage is loaded. After an abort
    //  the products are of whatever the stages hold, so that the warps stay together up to the
    // vote in the epilogue.
    template <uint32_t num_rows>
    __device__ __forceinline__ void run(uint32_t num_k_blocks,
                                        Accumulators<num_rows>& accumulators) {
        float (&upper)[num_rows / 2] = accumulators[0];
        float (&lower)[num_rows / 2] = accumulators[1];
        Group groups[num_groups_in_registers];
        const Decoder decoder;
#pragma unroll
        for (uint32_t i = 0; i < num_rows / 2; ++i) {
            accumulators[0][i] = accumulators[1][i] = 0.0f;
        }
        stage_wait_.reset();
        Stage stage = enter_stage();
        Packed packed = {load_packed(stage, 0, 0), load_second(stage)};
        bool may_change_scale = false;
        if constexpr (has_token_factors<Config>) may_change_scale = changes_scale(smem_, stage.idx);
#pragma unroll 1
        for (uint32_t k_block_idx = 0;;) {
            // Loaded here and needed at the end, so no thread waits for the load.
            //~ stage_asked
            const bool next_is_loaded =
                ptx::mbarrier_test_wait_parity(smem_.full_barriers(ring_.stage), ring_.parity);
            const bool is_first = k_block_idx == 0;
            multiply_row_half<0>(upper, stage, is_first, decoder, packed, groups);
            multiply_row_half<1>(lower, stage, is_first, decoder, packed, groups);
            if (++k_block_idx == num_k_blocks) break;

            stage_wait_.start();
            if (!next_is_loaded) await_stage();  //~ stage_awaited
            stage_wait_.stop();
            stage = enter_stage();
            packed[0] = load_packed(stage, 0, 0);
            packed[1] = load_second(stage);
            if constexpr (has_token_factors<Config>) {
                if (may_change_scale && changes_scale(smem_, stage.idx)) {
                    // ptxas gives up all overlap if accumulators are touched where it cannot prove
                    // which products are complete. Hence a wait for all of them, just before.
                    ptx::wgmma_wait_group<0>();  //~ rescale_wait
                    rescale(smem_, stage.idx, upper);
                    rescale(smem_, stage.idx, lower);  //~ lower_rescaled
                }
            }
        }
        ptx::wgmma_wait_group<0>();  //~ sums_complete
        ptx::wgmma_keep_order(upper);
        ptx::wgmma_keep_order(lower);
        release(stage.idx);  //~ last_stage_released
    }

    // In the last run, for stages behind the first. For traces.
    __device__ uint32_t waited_ticks() const { return stage_wait_.ticks(); }

 private:
    // A loaded stage, and the shifts of its rows.
    struct Stage {
        uint32_t idx;
        typename Decoder::Shifts shifts;
    };

    __device__ __forceinline__ Stage enter_stage() {
        const uint32_t idx = ring_.stage;
        ring_.advance();
        return {idx, Decoder::load_shifts(part(idx), thread_idx_)};
    }

    // The weights of some consecutive products of a row half, the unit-th of these.
    __device__ __forceinline__ uint4 load_packed(const Stage& stage, uint32_t row_half,
                                                 uint32_t unit) const {
        constexpr uint32_t unit_bytes = MathThread<Config>::warpgroup_threads * sizeof(uint4);
        return ptx::ld_shared_v4(part(stage.idx) + row_half * (units_per_row_half * unit_bytes) +
                                 unit * unit_bytes + thread_idx_ * sizeof(uint4));
    }
    __device__ __forceinline__ uint4 load_second(const Stage& stage) const {
        return units_per_row_half == 1 ? load_packed(stage, 1, 0) : load_packed(stage, 0, 1);
    }

    // The products of 64 of the thread's rows in a stage. If a row half is all that fits into
    // registers, it reads the weights of the lower ones behind those of the upper ones.
    template <uint32_t row_half, uint32_t num_accumulators>
    __device__ __forceinline__ void multiply_row_half(float (&accumulators)[num_accumulators],
                                                      const Stage& stage, bool is_first_stage,
                                                      const Decoder& decoder, Packed& packed,
                                                      Group (&groups)[num_groups_in_registers]) {
        const auto tables = Decoder::template tables<row_half>(stage.shifts);
        const uint32_t tokens = operand_descriptor_low<Config>(smem_.activations(stage.idx));
#pragma unroll
        for (uint32_t i = 0; i < mmas_per_row_half; ++i) {
            const uint32_t group_idx = (row_half * mmas_per_row_half + i) / mmas_per_group;
            const uint32_t idx_in_group = i % mmas_per_group;
            Group& group = groups[group_idx % num_groups_in_registers];
            const uint32_t unit = i / mmas_per_unit;
            const bool is_last_of_unit = i % mmas_per_unit == mmas_per_unit - 1;
            uint4& own = packed[(row_half * units_per_row_half + unit) % num_units_in_registers];
            decoder.decode(own, i, tables, group[idx_in_group]);
            if (row_half == 0 && units_per_row_half > 1 && is_last_of_unit) {
                own = load_packed(stage, 1, unit);
            }
            if ((i + 1) % mmas_per_group != 0) continue;
            multiply(accumulators, group, tokens, i - idx_in_group);
            // What read the stage before is older than the three newest groups.
            //~ stage_released
            if (group_idx == 2 && !is_first_stage) release(Ring::stage_before(stage.idx));
        }
    }

    // Starts a group of products, and waits for the one whose registers are decoded into next, that
    // is the fourth newest. With a main loop for each size of m-block, ptxas follows no more than
    // two groups in flight at a wait: then for both of a row half at once.
    template <uint32_t num_accumulators>
    __device__ __forceinline__ void multiply(float (&accumulators)[num_accumulators],
                                             const Group& group, uint32_t tokens,
                                             uint32_t first_mma) {
        ptx::wgmma_fence();  //~ wgmma_fence
#pragma unroll
        for (uint32_t i = 0; i < mmas_per_group; ++i) {
            Decoder::multiply(
                accumulators, group[i],
                operand_descriptor(tokens + (first_mma + i) * (mma_bytes >> 4)));  //~ wgmma
        }
        ptx::wgmma_commit_group();
        if constexpr (!has_mixed_tiles<Config>) {
            ptx::wgmma_wait_group<num_groups_in_registers - 1>();  //~ groups_in_flight
        } else {
            static_assert(mmas_per_group == 2, "a row half is two groups");
            if (first_mma > 0) ptx::wgmma_wait_group<2>();  //~ mixed_groups_in_flight
        }
    }

    // Every warp for itself: the tensor core may be done with one warp's rows before another's.
    __device__ __forceinline__ void release(uint32_t stage) {
        //~ warp_releases
        smem_.release_stage(stage, thread_idx_ % warp_size);
    }

    __device__ uint32_t part(uint32_t stage) const {
        return smem_.weight_blocks(stage) + part_offset_;
    }

    const SharedMemory<Config>& smem_;
    uint32_t part_offset_;
    uint32_t thread_idx_;  // in the warpgroup
    Waiter& waiter_;
    Ring ring_;
    TraceStopwatch<Config> stage_wait_;
};

}  // namespace deep_moe::sm90
