// INT4 weights on SM100, which are decoded to BF16 beside BF16 tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/formats/int4_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm100 {

// From packed INT4 weights in shared memory to the A operand of a BF16 MMA: a BF16 scale for
// each group of 32 along k (deep_moe/weights/int4/sm90_bf16_blocks.py).
class Int4RowDecoder {
 public:
    static constexpr uint32_t multiplier_bytes = 4;

    static __device__ __forceinline__ uint32_t load_multipliers(uint32_t address, uint32_t row) {
        return ptx::ld_shared_u32(address + row * multiplier_bytes);
    }

    __device__ __forceinline__ void decode(const uint4& chunk, uint32_t multipliers, uint32_t i,
                                           ChunkPairs& pairs) const {
        const uint32_t both =
            ptx::prmt(multipliers, 0, i == 0 ? 0x1010 : 0x3232);  //~ sm100_int4_scale
        words_.decode_chunk(chunk, pairs, [&](uint32_t) { return both; });
    }

 private:
    WordDecoder<Int4ToBf16> words_;
};

using Int4Bf16Weights = Bf16DecodedWeights<Int4RowDecoder>;

}  // namespace deep_moe::sm100
