// NVFP4 weights on SM100, beside tokens of the same format: E2M1 as it lies in memory, two values
// in a byte, with an E4M3 scale for 16 of them. Floats of rows and of tokens come behind the
// products.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/sm100_fp4_pull_policy.cuh"
#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/weights/nvfp4/sm100_bf16_decode.cuh"

namespace deep_moe::sm100 {

struct Nvfp4Weights {
    static constexpr bool has_scales = true;
    static constexpr bool has_factors = true;
    static constexpr bool has_unit_scales = false;
    static constexpr bool is_decoded = false;
    static constexpr uint32_t scale_words_per_k_block = 4;
    static constexpr uint32_t values_per_element = 2;

    // What a load counts on its barrier for so many bytes of shared memory.
    static constexpr uint32_t loaded_bytes(uint32_t smem_bytes) { return smem_bytes; }

    template <class Config>
    using PullPolicy = Fp4PullPolicy<Config>;
};

// Beside BF16 tokens they are decoded to BF16.
using Nvfp4Bf16Weights = Bf16DecodedWeights<Nvfp4RowDecoder>;

}  // namespace deep_moe::sm100
