// From packed NVFP4 weights in shared memory to the A operand of a BF16 MMA: a multiplier for each
// group of 16 along k, of 5 bits of exponent and 3 of mantissa
// (deep_moe/weights/nvfp4/sm90_bf16_blocks.py). Two significant bits of a value times four of its
// scale are exact in BF16.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm100 {

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

}  // namespace deep_moe::sm100
