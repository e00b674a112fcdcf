// MXFP4 weights on SM90: blocks that the math warps decode.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/sm90_fp4_decode.cuh"

namespace deep_moe::sm90 {

struct Mxfp4Weights {
    static constexpr uint32_t block_bytes = weight_block_bytes;
};

}  // namespace deep_moe::sm90
