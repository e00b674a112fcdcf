// SM100's policy for NVFP4 tokens on their way into the pool. The bytes pass through unchanged. The
// scale words go where the scale copies to TMEM read them. The token's float, which stands in front
// of them, goes where the epilogue reads it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/pull_tokens.cuh"
#include "deep_moe/dispatch/scale_words.cuh"
#include "deep_moe/formats/sm100_scale_layout.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm100 {

template <class Config>
struct Fp4PullPolicy {
    static constexpr uint32_t num_words = Config::hidden / 64;

    template <class Source>
    __device__ void store_scales(const SymmBuffer<Config>& local, const Source& source,
                                 const PulledToken& token) const {
        const auto words = source.input_x_sf(token.source.token_idx);
        const uint32_t factor = words[0];
        const ScaleWords<num_words> scales(words, 1);  //~ fp4_scale_words
        if (ptx::lane_idx() == 0) {
            *local.l1_token_factors(token.pool_token_idx) = __uint_as_float(factor);
        }
        const uint32_t column = sf_pool_token_idx<Config>(token.pool_block_idx, token.row_idx);
        scales.store([&](uint32_t i) { return local.l1_token_sf(i, column); });
    }

    __device__ void rewrite_token(const PulledToken&, uint32_t) const {}
};

}  // namespace deep_moe::sm100
