// INT4 to BF16, in registers.
//
// A mask and a multiply-add. BF16 numbers with nothing but their lowest 8 bits are those bits times
// 2^-133: subnormals, and the smallest normal numbers. So a code in bits 0 to 3 is a number as it
// lies. A code in bits 4 to 7 is one, too, 16 times as large. The code's product with the group's
// scale, less 8 times the scale, is rounded once.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe {

class Int4ToBf16 {
 public:
    using Fragment = uint32_t[4];

    // A thread's operand of one product: register j has the codes of nibbles j and 4 + j. scales:
    // of even registers in the lower half, of odd ones in the upper; 2^133 times as large as the
    // results are to be, of normal size. On SM90 even and odd registers have a row each.
    __device__ __forceinline__ void decode(uint32_t word, uint32_t scales,
                                           Fragment& fragment) const {
        constexpr uint32_t even_codes = 0x000f000f, odd_codes = 0x00f000f0;
        constexpr uint32_t one_and_2_to_minus_4 = 0x3d803f80, minus_2_to_minus_130 = 0x80088008;
        const uint32_t multipliers = ptx::mul_rn_bf16x2(scales, one_and_2_to_minus_4);
        const uint32_t offsets = ptx::mul_rn_bf16x2(scales, minus_2_to_minus_130);
        const uint32_t words[2] = {word, word >> 8};  //~ int4_second_codes
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            fragment[2 * i] =
                ptx::fma_rn_bf16x2(words[i] & even_codes, ptx::lower_half_twice(multipliers),
                                   ptx::lower_half_twice(offsets));
            fragment[2 * i + 1] =
                ptx::fma_rn_bf16x2(words[i] & odd_codes, ptx::upper_half_twice(multipliers),
                                   ptx::upper_half_twice(offsets));  //~ int4_row
        }
    }
};

}  // namespace deep_moe
