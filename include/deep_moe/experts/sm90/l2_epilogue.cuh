// From Linear2's accumulators to the combine buffers: row and token factors, biases and with them
// the routing weight, rounding to BF16, and each valid token's 256 values straight to the rank that
// it came from.
//
// A thread's 4 rows are neighbours, the 8 threads of a token 32 of them: 64 contiguous bytes per
// token and warp need no way through shared memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/block_header.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/rescaler.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/ld_st.cuh"

namespace deep_moe::sm90 {

// For m-blocks of num_rows rows.
template <class Config, uint32_t num_rows>
class L2Epilogue {
    using Smem = SharedMemory<Config>;
    using Thread = MathThread<Config>;
    using Biases = typename Config::Biases;

 public:
    __device__ L2Epilogue(const Smem& smem, const Thread& thread, uint32_t slot)
        : smem_(smem), thread_(thread), slot_(slot) {}

    // Any math warp, for its share.
    __device__ __forceinline__ void run(const BlockHeader& block, const RowValues& factors,
                                        const RowValues& biases,
                                        const Accumulators<num_rows>& sums) const {
        const uint32_t column = block.n_block_idx * Config::block_n +
                                thread_.warpgroup_idx() * 128 + 4 * thread_.row_run();
        // With an odd hidden / 128 the last block's second half does not exist.
        //~ rows_exist
        if (Config::hidden % Config::block_n != 0 && column >= Config::hidden) return;
        const uint32_t destinations =
            smem_.destinations(slot_) + thread_.first_token() * sizeof(uint64_t);
        // Sums are in units of the scale of the last k-block.
        const uint32_t scales = first_scales();
        for_each_8_rows<num_rows>([&](uint32_t j) {
            const uint4 rows_of_two = ptx::ld_shared_v4(destinations + 8 * j * sizeof(uint64_t));
            const float2 scale = load_scales(scales, j);
            float2 weight{};
            if constexpr (Biases::exist) {
                weight = ptx::ld_shared_f32x2(smem_.topk_weights(slot_) +
                                              (8 * j + thread_.first_token()) *
                                                  sizeof(float));  //~ l2_weights
            }
            store_token(rows_of_two.x, rows_of_two.y, column, factors, scale.x, biases, weight.x,
                        sums, 4 * j);
            store_token(rows_of_two.z, rows_of_two.w, column, factors, scale.y, biases, weight.y,
                        sums, 4 * j + 1);
        });
    }

 private:
    static constexpr bool has_scales = has_token_factors<Config>;

    __device__ uint32_t first_scales() const {
        if constexpr (has_scales) {
            return smem_.l2_token_factors(slot_) + thread_.first_token() * sizeof(float);
        } else {
            return 0;
        }
    }
    __device__ static float2 load_scales(uint32_t scales, uint32_t j) {
        if constexpr (has_scales) {
            return ptx::ld_shared_f32x2(scales + 8 * j * sizeof(float));
        } else {
            return {1.0f, 1.0f};
        }
    }

    __device__ __forceinline__ static void store_token(
        uint32_t row_low, uint32_t row_high, uint32_t column, const RowValues& factors, float scale,
        const RowValues& biases, float weight, const Accumulators<num_rows>& sums, uint32_t i) {
        const uint64_t row = uint64_t{row_high} << 32 | row_low;
        if (row == 0) return;
        uint32_t pairs[2];
#pragma unroll
        for (uint32_t b = 0; b < 2; ++b) {
            const float (&factor)[2] = factors.values[b];
            const float (&bias)[2] = biases.values[b];
            pairs[b] = ptx::cvt_rn_bf16x2_f32(
                Biases::linear2(sums[b][i + 2], factor[1] * scale, bias[1], weight),
                Biases::linear2(sums[b][i], factor[0] * scale, bias[0], weight));
        }
        *reinterpret_cast<uint2*>(row + column * sizeof(uint16_t)) = {pairs[0], pairs[1]};
    }

    const Smem& smem_;
    const Thread& thread_;
    uint32_t slot_;
};

}  // namespace deep_moe::sm90
