// INT4 weights on SM90: blocks that the math warps decode to BF16 beside BF16 tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/formats/int4_to_bf16.cuh"

namespace deep_moe::sm90 {

// From packed INT4 weights in shared memory to the register operand of a BF16 wgmma
// (deep_moe/weights/int4/sm90_bf16_blocks.py).
class Int4Decoder : public Bf16DecoderBase<4, 4>, public MultiplierWords {
 public:
    // Of a row half, for each group of 32 along k a word with the scales of both rows.
    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        return load_words(multipliers_at(part, thread_idx));
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        values_.decode(word_of(packed, i), tables.words[i / 2], fragment);  //~ int4_scale
    }

 private:
    Int4ToBf16 values_;
};

using Int4Bf16Weights = Bf16DecodedWeights<Int4Decoder>;

}  // namespace deep_moe::sm90
