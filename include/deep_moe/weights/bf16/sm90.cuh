// BF16 weights on SM90: both operands of wgmma in shared memory, tokens in BF16 too, no scales.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/plain_pull_policy.cuh"
#include "deep_moe/experts/sm90/shared_operand_loop.cuh"

namespace deep_moe::sm90 {

struct Bf16Weights {
    static constexpr uint32_t block_bytes = 256 * 128;
    static constexpr bool has_row_factors = false;
    static constexpr bool has_block_scales = false;
    // Nor has Linear1's output.
    static constexpr bool has_token_scales = false;
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = SharedOperandLoop<Config, Bf16Products>;
    template <class Config>
    using PullPolicy = PlainPullPolicy<Config>;
};

}  // namespace deep_moe::sm90
