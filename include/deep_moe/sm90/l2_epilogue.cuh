// From Linear2's accumulators to the combine buffers: row and token factors, rounding to BF16, and
// each valid token's 256 values straight to the rank it came from.
//
// A thread's 4 rows are neighbours, the 8 threads of a token 32 of them: 64 contiguous bytes per
// token and warp need no way through shared memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/layout/token_source.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sm90/block_header.cuh"
#include "deep_moe/sm90/l1_epilogue.cuh"
#include "deep_moe/sm90/main_loop.cuh"
#include "deep_moe/sm90/math_warp.cuh"
#include "deep_moe/sm90/shared_memory.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

template <class Config>
class L2Epilogue {
    using Smem = SharedMemory<Config>;
    using Thread = MathThread<Config>;

 public:
    __device__ L2Epilogue(const Smem& smem, const RankBuffers<Config>& ranks, const Thread& thread,
                          uint32_t turn)
        : smem_(smem), ranks_(ranks), local_(ranks.local()), thread_(thread), turn_(turn) {}

    // All math warps. False if one of them has given up: then nothing was stored.
    template <uint32_t num_tokens>
    __device__ __forceinline__ bool run(const BlockHeader& block, const RowFactors& rows,
                                        const Accumulators<num_tokens>& sums,
                                        Waiter& waiter) const {
        find_destinations<num_tokens>(block);
        if (!thread_.vote(waiter)) return false;
        clear_maxima(smem_, thread_, turn_ ^ 1);
        // The next block's destinations may be written while these are still read.
        store<num_tokens>(block, rows, sums);
        return true;
    }

 private:
    // A token's row of the combine buffer of the rank it came from; 0 behind the last valid one.
    template <uint32_t num_tokens>
    __device__ __forceinline__ void find_destinations(const BlockHeader& block) const {
        const uint32_t row = thread_.thread_idx;
        if (row >= num_tokens) return;
        uint64_t destination = 0;
        if (row < block.num_valid_rows) {
            const TokenSource source =
                *local_.token_source(block.pool_block_idx * Config::block_m + row);
            destination = reinterpret_cast<uint64_t>(
                ranks_.of(source.rank_idx).combine(source.topk_idx, source.token_idx));
        }
        ptx::st_shared_v2(
            smem_.destination(turn_, row),
            {static_cast<uint32_t>(destination), static_cast<uint32_t>(destination >> 32)});
    }

    template <uint32_t num_tokens>
    __device__ __forceinline__ void store(const BlockHeader& block, const RowFactors& rows,
                                          const Accumulators<num_tokens>& sums) const {
        const uint32_t column = block.n_block_idx * Config::block_n +
                                thread_.warpgroup_idx() * 128 + 4 * thread_.row_run();
        // With an odd hidden / 128 the last block's second half does not exist.
        if (Config::hidden % Config::block_n != 0 && column >= Config::hidden) return;
        const uint32_t first = block.pool_block_idx * Config::block_m + thread_.first_token();
        // Sums are in units of the scale of the last k-block.
        const auto* scales =
            reinterpret_cast<const float*>(local_.l2_token_sf(Config::num_l2_k_blocks - 1, first));
#pragma unroll
        for (uint32_t j = 0; j < num_tokens / 8; ++j) {
            const uint4 destinations =
                ptx::ld_shared_v4(smem_.destination(turn_, 8 * j + thread_.first_token()));
            const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j);
            store_token<num_tokens>(destinations.x, destinations.y, column, rows, scale.x, sums,
                                    4 * j);
            store_token<num_tokens>(destinations.z, destinations.w, column, rows, scale.y, sums,
                                    4 * j + 1);
        }
    }

    template <uint32_t num_tokens>
    __device__ __forceinline__ static void store_token(uint32_t row_low, uint32_t row_high,
                                                       uint32_t column, const RowFactors& rows,
                                                       float scale,
                                                       const Accumulators<num_tokens>& sums,
                                                       uint32_t i) {
        const uint64_t row = uint64_t{row_high} << 32 | row_low;
        if (row == 0) return;
        uint32_t pairs[2];
#pragma unroll
        for (uint32_t b = 0; b < 2; ++b) {
            pairs[b] = ptx::cvt_rn_bf16x2_f32(sums[b][i + 2] * (rows.values[b][1] * scale),
                                              sums[b][i] * (rows.values[b][0] * scale));
        }
        *reinterpret_cast<uint2*>(row + column * sizeof(uint16_t)) = {pairs[0], pairs[1]};
    }

    const Smem& smem_;
    const RankBuffers<Config>& ranks_;
    SymmBuffer<Config> local_;
    const Thread& thread_;
    uint32_t turn_;  // which destinations this block uses
};

}  // namespace deep_moe::sm90
