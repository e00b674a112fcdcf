// MXFP4 weights on SM90: blocks that the math warps decode, to E5M2 beside E4M3 tokens, to BF16
// beside BF16 tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/sm90_pull_policy.cuh"
#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/weights/mxfp4/sm90_bf16_decode.cuh"
#include "deep_moe/weights/mxfp4/sm90_e5m2_decode.cuh"

namespace deep_moe::sm90 {

struct Mxfp4Weights {
    static constexpr uint32_t block_bytes = 2 * E5m2Decoder::part_bytes;
    // A factor for each row; what its groups of 32 differ in lies in the block.
    static constexpr bool has_row_factors = true;
    static constexpr bool has_block_scales = false;
    static constexpr bool has_token_scales = true;
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = sm90::MainLoop<Config, E5m2Decoder>;
    template <class Config>
    using PullPolicy = sm90::PullPolicy<Config>;
};

using Mxfp4Bf16Weights = Bf16DecodedWeights<Bf16Decoder>;

}  // namespace deep_moe::sm90
