// FP8 weights on SM100: E4M3 as it lies in memory.
#pragma once

#include <cuda/std/cstdint>
#include <cute/arch/mma_sm100_desc.hpp>

#include "deep_moe/dispatch/sm100_pull_policy.cuh"

namespace deep_moe::sm100 {

struct Fp8Weights {
    static constexpr bool has_scales = true;
    static constexpr bool has_factors = false;
    static constexpr uint32_t scale_words_per_k_block = 1;
    static constexpr uint32_t values_per_element = 1;
    static constexpr auto mma_format = cute::UMMA::MXF8F6F4Format::E4M3;

    // What a load counts on its barrier for so many bytes of shared memory.
    static constexpr uint32_t loaded_bytes(uint32_t smem_bytes) { return smem_bytes; }

    template <class Config>
    using PullPolicy = sm100::PullPolicy<Config>;
};

}  // namespace deep_moe::sm100
