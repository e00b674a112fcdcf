// NVFP4 weights on SM90: blocks that the math warps decode to BF16 beside BF16 tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm90 {

// From packed NVFP4 weights in shared memory to the register operand of a BF16 wgmma: a
// multiplier for each group of 16 along k, which is one product
// (deep_moe/weights/nvfp4/sm90_bf16_blocks.py). Two significant bits of a value times four of
// its scale are exact in BF16.
class Nvfp4Decoder : public Bf16DecoderBase<4, 4>, public MultiplierWords {
 public:
    // Of a row half, a word for each two products: of product i and row h, a byte of 5 bits of
    // exponent and 3 of mantissa, in byte 2*(i % 2) + h.
    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        return load_words(multipliers_at(part, thread_idx));
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        // The bytes of both rows, each to where BF16 has its lowest bits of exponent and its
        // highest of mantissa, beneath the exponent's upper three.
        constexpr uint32_t mantissa_shift = 1 << 4, upper_exponent = 0x70007000;
        const uint32_t bytes =
            ptx::prmt(tables.words[i / 2], 0, i % 2 == 0 ? 0x4140 : 0x4342);  //~ nvfp4_scale
        values_.decode(word_of(packed, i), bytes * mantissa_shift + upper_exponent, fragment);
    }

 private:
    E2m1ToBf16 values_;
};

using Nvfp4Bf16Weights = Bf16DecodedWeights<Nvfp4Decoder>;

}  // namespace deep_moe::sm90
