// From packed MXFP4 weights in shared memory to the A operand of a BF16 MMA: a power of two for
// each group of 32 along k (deep_moe/weights/mxfp4/sm90_bf16_blocks.py).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm100 {

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

}  // namespace deep_moe::sm100
