// FP8 weights on SM100: E4M3 as it lies in memory. A second form has one scale for every row,
// beside tokens that have one scale each.
#pragma once

#include <cuda/std/cstdint>
#include <cute/arch/mma_sm100_desc.hpp>

#include "deep_moe/dispatch/sm100_pull_policy.cuh"
#include "deep_moe/dispatch/token_scale_pull_policy.cuh"

namespace deep_moe::sm100 {

struct Fp8Weights {
    static constexpr bool has_scales = true;
    static constexpr bool has_factors = false;
    static constexpr bool has_unit_scales = false;
    static constexpr bool is_decoded = false;
    static constexpr uint32_t scale_words_per_k_block = 1;
    static constexpr uint32_t values_per_element = 1;
    static constexpr auto mma_format = cute::UMMA::MXF8F6F4Format::E4M3;

    // What a load counts on its barrier for so many bytes of shared memory.
    static constexpr uint32_t loaded_bytes(uint32_t smem_bytes) { return smem_bytes; }

    template <class Config>
    using PullPolicy = sm100::PullPolicy<Config>;
};

struct Fp8RowScaledWeights : Fp8Weights {
    // Of rows and of tokens, behind the products.
    static constexpr bool has_factors = true;
    // Whether no product has other scales than those of Linear1's output: Linear1's have none, and
    // those of Linear2's weights are 1. None of them is loaded.
    static constexpr bool has_unit_scales = true;

    template <class Config>
    using PullPolicy = TokenScalePullPolicy<Config>;
};

}  // namespace deep_moe::sm100
