// Tokens without scales pass into the pool unchanged.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/pull_tokens.cuh"
#include "deep_moe/layout/symm_buffer.cuh"

namespace deep_moe {

template <class Config>
struct PlainPullPolicy {
    template <class Source>
    __device__ void store_scales(const SymmBuffer<Config>&, const Source&,
                                 const PulledToken&) const {}
    __device__ void rewrite_token(const PulledToken&, uint32_t) const {}
};

}  // namespace deep_moe
