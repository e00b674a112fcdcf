// MXFP4 weights on SM90 for tokens in BF16: blocks that the math warps decode to BF16.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/plain_pull_policy.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/formats/sm90_fp4_bf16_decode.cuh"

namespace deep_moe::sm90 {

struct Mxfp4Bf16Weights {
    static constexpr uint32_t block_bytes = 2 * Bf16Decoder::part_bytes;
    // A factor for each row; what its groups of 32 differ in lies in the block.
    static constexpr bool has_row_factors = true;
    static constexpr bool has_block_scales = false;
    // Nor has Linear1's output.
    static constexpr bool has_token_scales = false;
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = sm90::MainLoop<Config, Bf16Decoder>;
    template <class Config>
    using PullPolicy = PlainPullPolicy<Config>;
};

}  // namespace deep_moe::sm90
