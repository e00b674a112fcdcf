// MXFP4 weights on SM100: E2M1, which a load unpacks to a byte per value.
#pragma once

#include <cuda/std/cstdint>
#include <cute/arch/mma_sm100_desc.hpp>

#include "deep_moe/dispatch/sm100_pull_policy.cuh"
#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/weights/mxfp4/sm100_bf16_decode.cuh"

namespace deep_moe::sm100 {

struct Mxfp4Weights {
    static constexpr bool has_scales = true;
    static constexpr bool has_factors = false;
    static constexpr bool has_unit_scales = false;
    static constexpr bool is_decoded = false;
    static constexpr uint32_t scale_words_per_k_block = 1;
    static constexpr uint32_t values_per_element = 1;
    static constexpr auto mma_format = cute::UMMA::MXF8F6F4Format::E2M1;

    // What a load counts on its barrier for so many bytes of shared memory: packed, 16 values are 8
    // bytes, which it spreads over 16.
    static constexpr uint32_t loaded_bytes(uint32_t smem_bytes) { return smem_bytes / 2; }

    template <class Config>
    using PullPolicy = sm100::PullPolicy<Config>;
};

// Beside BF16 tokens they are decoded to BF16.
using Mxfp4Bf16Weights = Bf16DecodedWeights<Mxfp4RowDecoder>;

}  // namespace deep_moe::sm100
