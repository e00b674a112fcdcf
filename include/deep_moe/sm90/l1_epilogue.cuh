// From Linear1's accumulators to Linear2's input: row and token factors, SwiGLU, requantization to
// E4M3 with one scale for the block's 128 values of each token, store to the pool, and the arrival
// bit that lets Linear2 start.
//
// A thread's rows are gate and up of two neighbouring values, in its own registers. A token's 128
// values are spread over all math warps: their maximum is found in shared memory, and the bytes
// meet there, too, to leave as whole 128-byte rows.
//
// Linear2 reads its k in the order of its weights (fp4_decode.cuh): byte 32*j + 16*h + 4*q + b of
// 128 holds value 32*q + 8*j + 4*h + b.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/quantize.cuh"
#include "deep_moe/sm90/block_header.cuh"
#include "deep_moe/sm90/linear2_scale.cuh"
#include "deep_moe/sm90/main_loop.cuh"
#include "deep_moe/sm90/math_warp.cuh"
#include "deep_moe/sm90/shared_memory.cuh"
#include "deep_moe/swiglu.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// Prepares the maxima of the block of that turn. All math warps; a barrier must follow.
template <class Config>
__device__ __forceinline__ void clear_maxima(const SharedMemory<Config>& smem,
                                             const MathThread<Config>& thread, uint32_t turn) {
    if (thread.thread_idx < Config::block_m) {
        ptx::st_shared_u32(smem.amax(turn, thread.thread_idx), 0);
    }
}

template <class Config>
class L1Epilogue {
    using Smem = SharedMemory<Config>;
    using Thread = MathThread<Config>;

 public:
    __device__ L1Epilogue(const Smem& smem, const SymmBuffer<Config>& local, const Thread& thread,
                          uint32_t turn)
        : smem_(smem), local_(local), thread_(thread), turn_(turn) {}

    // All math warps. False if one of them has given up: then nothing was stored.
    template <uint32_t num_tokens>
    __device__ __forceinline__ bool run(const BlockHeader& block, const RowFactors& rows,
                                        Accumulators<num_tokens>& values, Waiter& waiter) const {
        activate<num_tokens>(block, rows, values);
        find_maxima<num_tokens>(values);
        // Behind this vote all maxima of the block are there, and nobody reads those of the block
        // before.
        if (!thread_.vote(waiter)) return false;
        clear_maxima(smem_, thread_, turn_ ^ 1);
        store_tokens<num_tokens>(block, values);
        store_scales(block);
        thread_.sync();
        publish(block);
        return true;
    }

 private:
    // Overwrites accumulators by values: register 2*j + p of half b is value b of token
    // 8*j + first_token() + p.
    template <uint32_t num_tokens>
    __device__ __forceinline__ void activate(const BlockHeader& block, const RowFactors& rows,
                                             Accumulators<num_tokens>& values) const {
        const uint32_t first = block.pool_block_idx * Config::block_m + thread_.first_token();
        const auto* factors = reinterpret_cast<const float*>(local_.l1_token_sf(0, first));
        const float* weights = local_.l1_topk_weight(first);
#pragma unroll
        for (uint32_t j = 0; j < num_tokens / 8; ++j) {
            const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j);
            const float2 weight = *reinterpret_cast<const float2*>(weights + 8 * j);
#pragma unroll
            for (uint32_t b = 0; b < 2; ++b) {
                float (&v)[num_tokens / 2] = values[b];
                const float (&row)[2] = rows.values[b];
                v[2 * j] = swiglu<Config>(v[4 * j] * (row[0] * factor.x),
                                          v[4 * j + 2] * (row[1] * factor.x), weight.x);
                v[2 * j + 1] = swiglu<Config>(v[4 * j + 1] * (row[0] * factor.y),
                                              v[4 * j + 3] * (row[1] * factor.y), weight.y);
            }
        }
    }

    template <uint32_t num_tokens>
    __device__ __forceinline__ void find_maxima(const Accumulators<num_tokens>& values) const {
#pragma unroll
        for (uint32_t i = 0; i < num_tokens / 4; ++i) {
            uint32_t amax = max(magnitude_bits(values[0][i]), magnitude_bits(values[1][i]));
#pragma unroll
            for (uint32_t lane_mask = 4; lane_mask < warp_size; lane_mask *= 2) {
                amax = max(amax, __shfl_xor_sync(full_warp, amax, lane_mask));
            }
            if (thread_.row() == 0) {
                ptx::red_max_shared(smem_.amax(turn_, i / 2 * 8 + thread_.first_token() + i % 2),
                                    amax);
            }
        }
    }

    // Two neighbouring lanes (of rows 2*i and 2*i + 1) hold four consecutive bytes of two tokens:
    // each puts together those of one and stores them. A token's 128 bytes meet in L2, which they
    // reach as words; the detour through shared memory that would make whole rows of them costs
    // more than it saves, and the room of a pipeline stage.
    template <uint32_t num_tokens>
    __device__ __forceinline__ void store_tokens(const BlockHeader& block,
                                                 const Accumulators<num_tokens>& values) const {
        const uint32_t is_odd = thread_.row() % 2;
        const uint32_t selectors = is_odd ? 0x3276 : 0x5410;
        constexpr uint32_t lane_of_next_row = 4;
        const uint32_t first = thread_.first_token() + is_odd;
        const float* weights = local_.l1_topk_weight(block.pool_block_idx * Config::block_m +
                                                     thread_.first_token());
        uint8_t* const token = local_.l2_token(block.pool_block_idx * Config::block_m + first) +
                               block.n_block_idx * (Config::block_n / 2) + byte_idx();
#pragma unroll
        for (uint32_t j = 0; j < num_tokens / 8; ++j) {
            const uint2 amax = ptx::ld_shared_v2(smem_.amax(turn_, 8 * j + thread_.first_token()));
            const float2 weight = *reinterpret_cast<const float2*>(weights + 8 * j);
            const float factors[2] = {
                e4m3_factor(amax.x, linear2_scale_byte(amax.x, weight.x)),
                e4m3_factor(amax.y, linear2_scale_byte(amax.y, weight.y))};
            uint32_t mine = 0;
#pragma unroll
            for (uint32_t p = 0; p < 2; ++p) {
                mine |= static_cast<uint32_t>(ptx::cvt_rn_satfinite_e4m3x2_f32(
                            values[1][2 * j + p] * factors[p], values[0][2 * j + p] * factors[p]))
                        << (16 * p);
            }
            const uint32_t other = __shfl_xor_sync(full_warp, mine, lane_of_next_row);
            if (8 * j + first < block.num_valid_rows) {
                *reinterpret_cast<uint32_t*>(token + 8 * j * Config::intermediate_hidden) =
                    ptx::prmt(mine, other, selectors);
            }
        }
    }

    // Where, in the order of k, the four values stand that this lane and its neighbour have:
    // values 64*warpgroup + 2*row_run() and on.
    __device__ uint32_t byte_idx() const {
        const uint32_t chunk = thread_.warp_idx() % 2 * 4 + thread_.row() / 2;
        return chunk * 16 + (2 * thread_.warpgroup_idx() + thread_.warp_idx() / 2) * 4;
    }

    __device__ void store_scales(const BlockHeader& block) const {
        const uint32_t row = thread_.thread_idx;
        if (row >= block.num_valid_rows) return;
        const uint32_t pool_token_idx = block.pool_block_idx * Config::block_m + row;
        const uint32_t byte = linear2_scale_byte(ptx::ld_shared_u32(smem_.amax(turn_, row)),
                                                 *local_.l1_topk_weight(pool_token_idx));
        *local_.l2_token_sf(block.n_block_idx, pool_token_idx) = byte << 23;
    }

    // The barrier before it orders the stores of all warps in front of this release. Readers load
    // the tokens with TMA, and put fence.proxy.async between their acquire and the first copy.
    __device__ void publish(const BlockHeader& block) const {
        if (thread_.thread_idx == 0) {
            ptx::red_or_release_gpu(
                local_.l2_arrival_mask(block.pool_block_idx, block.n_block_idx / 64),
                uint64_t{1} << (block.n_block_idx % 64));
        }
        __syncwarp();
    }

    const Smem& smem_;
    const SymmBuffer<Config>& local_;
    const Thread& thread_;
    uint32_t turn_;  // which maxima this block uses
};

}  // namespace deep_moe::sm90
