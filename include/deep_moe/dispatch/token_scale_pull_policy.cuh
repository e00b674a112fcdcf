// The policy for tokens with one scale. The scale is stored beside the token, and the bytes stay
// unchanged.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/pull_tokens.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

template <class Config>
struct TokenScalePullPolicy {
    template <class Source>
    __device__ void store_scales(const SymmBuffer<Config>& local, const Source& source,
                                 const PulledToken& token) const {
        if (ptx::lane_idx() != 0) return;
        //~ token_scale_copied
        *local.l1_token_sf(0, token.pool_token_idx) =
            __float_as_uint(source.input_x_sf(token.source.token_idx)[0]);
    }
    __device__ void rewrite_token(const PulledToken&, uint32_t) const {}
};

}  // namespace deep_moe
