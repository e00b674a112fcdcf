// MXFP4 weights on SM100: E2M1, which a load unpacks to a byte per value.
#pragma once

#include <cuda/std/cstdint>
#include <cute/arch/mma_sm100_desc.hpp>

#include "deep_moe/dispatch/sm100_pull_policy.cuh"
#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

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

// From packed MXFP4 weights in shared memory to the A operand of a BF16 MMA: a power of two for
// each group of 32 along k (deep_moe/weights/mxfp4/sm90_bf16_blocks.py).
class Mxfp4RowDecoder {
 public:
    static constexpr uint32_t multiplier_bytes = 2;

    static __device__ __forceinline__ uint32_t load_multipliers(uint32_t address, uint32_t row) {
        return ptx::ld_shared_u16(address + row * multiplier_bytes);
    }

    __device__ __forceinline__ void decode(const uint4& chunk, uint32_t multipliers, uint32_t i,
                                           ChunkPairs& pairs) const {
        constexpr uint32_t exponent = 1 << 7;  // its lowest bit
        const uint32_t both =
            ptx::prmt(multipliers, 0, 0x4040 + i * 0x0101) * exponent;  //~ sm100_mxfp4_scale
        words_.decode_chunk(chunk, pairs, [&](uint32_t) { return both; });
    }

 private:
    WordDecoder<E2m1ToBf16> words_;
};

// Beside BF16 tokens they are decoded to BF16.
using Mxfp4Bf16Weights = Bf16DecodedWeights<Mxfp4RowDecoder>;

}  // namespace deep_moe::sm100
