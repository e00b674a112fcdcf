// NVFP4 weights on SM100, beside tokens of the same format: E2M1 as it lies in memory, two values
// in a byte, with an E4M3 scale for 16 of them. Floats of rows and of tokens come behind the
// products.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/sm100_fp4_pull_policy.cuh"
#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

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

// From packed NVFP4 weights in shared memory to the A operand of a BF16 MMA: a multiplier for
// each group of 16 along k, of 5 bits of exponent and 3 of mantissa
// (deep_moe/weights/nvfp4/sm90_bf16_blocks.py). Two significant bits of a value times four of
// its scale are exact in BF16.
class Nvfp4RowDecoder {
 public:
    static constexpr uint32_t multiplier_bytes = 4;

    static __device__ __forceinline__ uint32_t load_multipliers(uint32_t address, uint32_t row) {
        return ptx::ld_shared_u32(address + row * multiplier_bytes);
    }

    __device__ __forceinline__ void decode(const uint4& chunk, uint32_t multipliers, uint32_t i,
                                           ChunkPairs& pairs) const {
        words_.decode_chunk(chunk, pairs, [&](uint32_t word) {
            // The byte to where BF16 has its lowest bits of exponent and its highest of mantissa,
            // beneath the exponent's upper three.
            constexpr uint32_t mantissa_shift = 1 << 4, upper_exponent = 0x70007000;
            const uint32_t group = 2 * i + word / 2;
            return ptx::prmt(multipliers, 0, 0x4040 + group * 0x0101) * mantissa_shift +
                   upper_exponent;  //~ sm100_nvfp4_scale
        });
    }

 private:
    WordDecoder<E2m1ToBf16> words_;
};

// Beside BF16 tokens they are decoded to BF16.
using Nvfp4Bf16Weights = Bf16DecodedWeights<Nvfp4RowDecoder>;

}  // namespace deep_moe::sm100
