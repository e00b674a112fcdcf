// FP8 weights on SM90: E4M3 that wgmma takes from shared memory, with a scale for every 128 x 128.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/sm90_float_scale_pull_policy.cuh"
#include "deep_moe/dispatch/sm90_pull_policy.cuh"
#include "deep_moe/dispatch/token_scale_pull_policy.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/promoting_loop.cuh"
#include "deep_moe/experts/sm90/shared_operand_loop.cuh"

namespace deep_moe::sm90 {

struct Fp8Weights {
    static constexpr uint32_t block_bytes = 256 * 128;
    // Scales come with each stage, nothing with the block.
    static constexpr bool has_row_factors = false;
    static constexpr bool has_block_scales = true;
    static constexpr bool has_token_scales = true;
    // Whether the sums of a k-block are multiplied by the scales of its tokens, too. Otherwise a
    // token's scales go into its bytes at the pull, or are those of the block before
    // (rescaler.cuh).
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = PromotingLoop<Config>;
    template <class Config>
    using PullPolicy = sm90::PullPolicy<Config>;
};

struct Fp8WeightsFloatScaledTokens : Fp8Weights {
    static constexpr bool promotes_token_scales = true;

    template <class Config>
    using PullPolicy = sm90::FloatScalePullPolicy<Config>;
};

struct Fp8RowScaledWeights {
    static constexpr uint32_t block_bytes = 256 * 128;
    static constexpr bool has_row_factors = true;
    static constexpr bool has_block_scales = false;
    // Of tokens one for all values. Of Linear1's output as beside other E4M3 tokens.
    static constexpr bool has_token_scales = true;
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = SharedOperandLoop<Config, E4m3Products>;
    template <class Config>
    using PullPolicy = TokenScalePullPolicy<Config>;
};

}  // namespace deep_moe::sm90
