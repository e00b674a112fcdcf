// The products of one block of 8 rows with weights that are decoded to BF16 beside BF16 tokens: as
// main_loop.cuh's, to the bit, but by mma.sync. Each warp multiplies for itself.
//
// Products of 8 columns are so short that what bounds them is how many instructions a quarter of
// the SM issues. A wgmma keeps the quarter from issuing for 13 cycles, an mma.sync of the same 16
// rows for 6. And a warp here neither meets others nor waits for its products. While it decodes and
// multiplies one k-block, what the next stage holds is on its way to registers.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/mma.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm90 {

// One thread's walk through the stages.
template <class Config, class Decoder>
class EightRowLoop {
    using Ring = RingPosition<Config::num_stages>;
    static constexpr uint32_t num_rows_of_block = 8;
    static constexpr uint32_t num_mmas = Decoder::mmas_per_row_half;
    static constexpr uint32_t num_units = num_mmas / Decoder::mmas_per_unit;  // of a row half
    // Of the tokens' 64 k.
    static constexpr uint32_t token_row_bytes = 128;
    static constexpr uint32_t chunk_bytes = 16;
    static constexpr uint32_t mmas_per_load = 2;
    static_assert(Decoder::block_k * sizeof(uint16_t) == token_row_bytes);

 public:
    __device__ EightRowLoop(const SharedMemory<Config>& smem, const MathThread<Config>& thread,
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

    // Adds up the whole K of a block, whose first stage is loaded. After an abort the products are
    // of whatever the stages hold.
    template <uint32_t num_rows>
    __device__ __forceinline__ void run(uint32_t num_k_blocks,
                                        Accumulators<num_rows>& accumulators) {
        static_assert(num_rows == num_rows_of_block);
        const Decoder decoder;
#pragma unroll
        for (uint32_t i = 0; i < num_rows / 2; ++i) {
            accumulators[0][i] = accumulators[1][i] = 0.0f;
        }
        stage_wait_.reset();
        // Those of a k-block and of the next, by turns.
        Operands even, odd;
        load(even);
        release_last();
#pragma unroll 1
        for (;;) {
            if (--num_k_blocks == 0) return multiply(decoder, even, accumulators);
            step(decoder, even, odd, accumulators);
            if (--num_k_blocks == 0) return multiply(decoder, odd, accumulators);
            step(decoder, odd, even, accumulators);
        }
    }

    // In the last run, for stages behind the first. For traces.
    __device__ uint32_t waited_ticks() const { return stage_wait_.ticks(); }

 private:
    // What a stage has for this thread.
    struct Operands {
        typename Decoder::Shifts shifts;
        uint4 packed[num_row_halves][num_units];
        uint32_t tokens[num_mmas / mmas_per_load][2 * mmas_per_load];
    };

    // Multiplies a k-block, and loads what the next stage has: before, so that it comes meanwhile,
    // if the stage is loaded by then.
    __device__ __forceinline__ void step(const Decoder& decoder, const Operands& operands,
                                         Operands& next, float (&sums)[num_row_halves][4]) {
        // The lanes load together, so they agree on it.
        //~ eight_rows_asked
        const bool is_loaded = __all_sync(
            full_warp,
            ptx::mbarrier_test_wait_parity(smem_.full_barriers(ring_.stage), ring_.parity));
        if (is_loaded) load(next);
        multiply(decoder, operands, sums);
        if (!is_loaded) {
            stage_wait_.start();
            await_stage();  //~ eight_rows_awaited
            __syncwarp();
            stage_wait_.stop();
            load(next);
        }
        release_last();
    }

    // From the stage that comes next.
    __device__ __forceinline__ void load(Operands& operands) {
        constexpr uint32_t unit_bytes = MathThread<Config>::warpgroup_threads * sizeof(uint4);
        const uint32_t part = smem_.weight_blocks(ring_.stage) + part_offset_;
        operands.shifts = Decoder::load_shifts(part, thread_idx_);
#pragma unroll
        for (uint32_t b = 0; b < num_row_halves; ++b) {
#pragma unroll
            for (uint32_t unit = 0; unit < num_units; ++unit) {
                operands.packed[b][unit] = ptx::ld_shared_v4(
                    part + (b * num_units + unit) * unit_bytes + thread_idx_ * sizeof(uint4));
            }
        }
        // Lane 8*i + j names chunk i of row j, in the 128-byte swizzle.
        const uint32_t lane_idx = thread_idx_ % warp_size;
        const uint32_t row = lane_idx % 8;
        const uint32_t row_address = smem_.activations(ring_.stage) + row * token_row_bytes;
#pragma unroll
        for (uint32_t i = 0; i < num_mmas / mmas_per_load; ++i) {
            const uint32_t chunk = i * (2 * mmas_per_load) + lane_idx / 8;
            ptx::ldmatrix_x4(row_address + (chunk ^ row) * chunk_bytes,
                             operands.tokens[i]);  //~ token_chunk
        }
        loaded_stage_ = ring_.stage;
        ring_.advance();
    }

    // The stage that was loaded from last. An arrival waits for the loads in front of it, so it
    // stands where these have long come.
    __device__ __forceinline__ void release_last() {
        __syncwarp();  //~ eight_rows_read
        smem_.release_stage(loaded_stage_, thread_idx_ % warp_size);
    }

    // Row halves by turns: a product waits for the one before it of the same sums.
    __device__ __forceinline__ void multiply(const Decoder& decoder, const Operands& operands,
                                             float (&sums)[num_row_halves][4]) const {
        const auto upper = Decoder::template tables<0>(operands.shifts);
        const auto lower = Decoder::template tables<1>(operands.shifts);
#pragma unroll
        for (uint32_t i = 0; i < num_mmas; ++i) {
            const uint32_t (&tokens)[2 * mmas_per_load] = operands.tokens[i / mmas_per_load];
            const uint32_t first = 2 * (i % mmas_per_load);
#pragma unroll
            for (uint32_t b = 0; b < num_row_halves; ++b) {
                typename Decoder::Fragment fragment;
                decoder.decode(operands.packed[b][i / Decoder::mmas_per_unit], i,
                               b == 0 ? upper : lower, fragment);
                ptx::mma_m16n8k16_f32_bf16_bf16(sums[b], fragment, tokens[first],
                                                tokens[first + 1]);
            }
        }
    }

    const SharedMemory<Config>& smem_;
    uint32_t part_offset_;
    uint32_t thread_idx_;  // in the warpgroup
    Waiter& waiter_;
    Ring ring_;
    uint32_t loaded_stage_ = 0;
    TraceStopwatch<Config> stage_wait_;
};

}  // namespace deep_moe::sm90
