// How many lanes look at the slots of a token.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"

namespace deep_moe {

// Lanes per token, if several tokens share a warp.
template <class Config>
__host__ __device__ constexpr uint32_t slot_lanes() {
    static_assert(Config::num_topk <= warp_size, "one lane per slot");
    uint32_t lanes = 1;
    while (lanes < Config::num_topk) lanes *= 2;
    return lanes;
}

}  // namespace deep_moe
