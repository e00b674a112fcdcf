// SM90's policy for tokens on their way into the pool.
//
// wgmma has no scales, so the token's scales (one per 32 values) go into its E4M3 bytes: every
// group is expressed in the token's largest scale 2^e. E4M3 is a floating-point format whose group
// scales only guard its range. What leaves the range here, subnormals and below, is 2^-15 of the
// largest representable value. The words are permuted so that the weights that one thread decodes
// share a scale: byte 32*j + 16*h + 4*q + b of 128 holds k = 32*q + 8*j + 4*h + b.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/pull_tokens.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm90 {

// 2^(byte - 127), as a float, for a UE8M0 byte; NaN for the byte that means NaN.
__device__ __forceinline__ float ue8m0_to_float(uint32_t byte) {
    if (byte == 255) return __uint_as_float(0x7fffffffu);
    return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

// 2^-num_steps in both halves of an F16 pair; below 2^-24, where no E4M3 value leaves anything, 0.
__device__ __forceinline__ uint32_t f16x2_power(uint32_t num_steps) {
    uint32_t half = 0;
    if (num_steps <= 14) {
        half = (15 - num_steps) << 10;
    } else if (num_steps <= 24) {
        half = 1u << (24 - num_steps);
    }
    return half | half << 16;
}

// Four E4M3 times a power of two, rounded to nearest even once: F16 holds every product that is not
// far below half of the smallest E4M3. NaN stays NaN.
__device__ __forceinline__ uint32_t scale_e4m3x4(uint32_t bytes, uint32_t power) {
    const uint32_t low = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(bytes));
    const uint32_t high = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(bytes >> 16));
    return ptx::cvt_rn_satfinite_e4m3x2_f16x2(ptx::mul_rn_f16x2(low, power)) |
           static_cast<uint32_t>(ptx::cvt_rn_satfinite_e4m3x2_f16x2(ptx::mul_rn_f16x2(high, power)))
               << 16;
}

template <class Config>
class PullPolicy {
    static constexpr uint32_t num_blocks = Config::hidden / 128;
    static constexpr uint32_t num_words_per_lane = ceil_div(num_blocks, warp_size);

 public:
    template <class Source>
    __device__ void store_scales(const SymmBuffer<Config>& local, const Source& source,
                                 const PulledToken& token) {
        const auto words = source.input_x_sf(token.source.token_idx);
        uint32_t largest = 0;
#pragma unroll
        for (uint32_t i = 0; i < num_words_per_lane; ++i) {
            const uint32_t block_idx = i * warp_size + ptx::lane_idx();
            scales_[i] = block_idx < num_blocks ? words[block_idx] : 0;
            largest = __vmaxu4(largest, scales_[i]);
        }
        largest = __vmaxu4(largest, largest >> 16);
        largest = max(largest & 0xff, (largest >> 8) & 0xff);
        token_scale_ = ptx::redux_sync_max(largest);
        if (ptx::lane_idx() == 0) {
            *local.l1_token_sf(0, token.pool_token_idx) =
                __float_as_uint(ue8m0_to_float(token_scale_));
        }
    }

    // Eight lanes share 128 bytes: lanes 2*q and 2*q + 1 of them rewrite scale group q, words
    // 8*q .. 8*q+7. Word 8*q + i belongs at 4*i + q. Each lane starts at another of its words (the
    // exclusive or), so that the lanes never meet on a bank.
    __device__ void rewrite_token(const PulledToken&, uint32_t bytes) const {
        constexpr uint32_t blocks_per_step = warp_size / lanes_per_block;
        const uint32_t block_in_step = ptx::lane_idx() / lanes_per_block;
        const uint32_t group = ptx::lane_idx() % lanes_per_block / 2;
        const uint32_t first_word = ptx::lane_idx() % 2 * words_per_lane + block_in_step;
#pragma unroll
        for (uint32_t i = 0; i < num_words_per_lane; ++i) {
#pragma unroll 1
            for (uint32_t step = 0; step < lanes_per_block; ++step) {
                const uint32_t idx = step * blocks_per_step + block_in_step;
                const uint32_t block_idx = i * warp_size + idx;
                const bool exists = block_idx < num_blocks;
                const uint32_t scales = __shfl_sync(full_warp, scales_[i], idx);
                // Worked out anew: another value over the loop is one too many for ptxas.
                const uint32_t block = bytes + block_idx * 128;
                const uint32_t source = block + 32 * group + 4 * first_word;
                uint32_t words[words_per_lane];
                if (exists) {
#pragma unroll
                    for (uint32_t k = 0; k < words_per_lane; ++k) {
                        words[k] = ptx::ld_shared_u32(source ^ (4 * k));
                    }
                }
                __syncwarp();  //~ words_read: the block's words have been read
                //~ group_scale
                const uint32_t power = f16x2_power(token_scale_ - ((scales >> (8 * group)) & 0xff));
                const uint32_t destination = block + 16 * first_word + 4 * group;
                if (exists) {
#pragma unroll
                    for (uint32_t k = 0; k < words_per_lane; ++k) {
                        ptx::st_shared_u32(destination ^ (16 * k), scale_e4m3x4(words[k], power));
                    }
                }
            }
        }
        ptx::fence_proxy_async_shared_cta();  //~ rewrite_fence
    }

 private:
    static constexpr uint32_t lanes_per_block = 8;
    static constexpr uint32_t words_per_lane = 128 / lanes_per_block / sizeof(uint32_t);

    uint32_t scales_[num_words_per_lane];  // [i] of lane l: word 32 * i + l of the token
    uint32_t token_scale_;                 // UE8M0: the largest of them
};

}  // namespace deep_moe::sm90
