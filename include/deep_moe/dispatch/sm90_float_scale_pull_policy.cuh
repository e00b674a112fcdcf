// SM90's policy for tokens with a float32 scale for every 128 values, on their way into the pool.
//
// The scales are stored beside the token, because the main loop multiplies by them
// (experts/sm90/promoting_loop.cuh). So the bytes stay unchanged, except that their words are
// permuted as those of all tokens (sm90_pull_policy.cuh).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/pull_tokens.cuh"
#include "deep_moe/dispatch/sm90_pull_policy.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm90 {

template <class Config>
class FloatScalePullPolicy {
    static constexpr uint32_t num_blocks = Config::hidden / 128;

 public:
    template <class Source>
    __device__ void store_scales(const SymmBuffer<Config>& local, const Source& source,
                                 const PulledToken& token) const {
        const auto scales = source.input_x_sf(token.source.token_idx);
#pragma unroll 2
        for (uint32_t block_idx = ptx::lane_idx(); block_idx < num_blocks; block_idx += warp_size) {
            //~ float_scale_column
            *local.l1_token_sf(block_idx, token.pool_token_idx) =
                __float_as_uint(scales[block_idx]);
        }
    }

    // A lane has the four words of a column, in the order in which they are stored.
    __device__ void rewrite_token(const PulledToken&, uint32_t bytes) const {
        constexpr uint32_t num_columns = 8;  // of a block: words i, 8 + i, 16 + i and 24 + i
        constexpr uint32_t num_steps = ceil_div(num_blocks * num_columns, warp_size);
        uint32_t column = ptx::lane_idx();
#pragma unroll 1
        for (uint32_t step = 0; step < num_steps; ++step, column += warp_size) {
            const bool exists = column < num_blocks * num_columns;
            const uint32_t block = bytes + column / num_columns * 128;
            const uint32_t idx = column % num_columns;
            uint4 words{};
            if (exists) {
                words.x = ptx::ld_shared_u32(block + 4 * idx);
                words.y = ptx::ld_shared_u32(block + 4 * idx + 32);
                words.z = ptx::ld_shared_u32(block + 4 * idx + 64);
                words.w = ptx::ld_shared_u32(block + 4 * idx + 96);
            }
            __syncwarp();  //~ columns_read: the blocks' words have been read
            if (exists) ptx::st_shared_v4(block + 16 * idx, words);  //~ column_place
        }
        ptx::fence_proxy_async_shared_cta();  //~ columns_fence
    }
};

}  // namespace deep_moe::sm90
