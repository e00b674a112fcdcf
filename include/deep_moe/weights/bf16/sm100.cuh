// BF16 weights on SM100: as they lie in memory, with tokens in BF16 and without scales.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/plain_pull_policy.cuh"

namespace deep_moe::sm100 {

struct Bf16Weights {
    // Of weights, tokens, and Linear1's output.
    static constexpr bool has_scales = false;
    static constexpr bool has_factors = false;
    static constexpr bool has_unit_scales = false;
    static constexpr bool is_decoded = false;
    static constexpr uint32_t values_per_element = 1;

    // What a load counts on its barrier for so many bytes of shared memory.
    static constexpr uint32_t loaded_bytes(uint32_t smem_bytes) { return smem_bytes; }

    template <class Config>
    using PullPolicy = PlainPullPolicy<Config>;
};

}  // namespace deep_moe::sm100
