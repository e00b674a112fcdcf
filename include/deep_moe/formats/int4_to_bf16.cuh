// INT4 to BF16, in registers. A code becomes the lowest bits of a BF16 number from 128 to 143;
// subtracting 136 gives its value. The product with its group's scale is rounded once.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/registers.cuh"

namespace deep_moe {

class Int4ToBf16 {
 public:
    using Fragment = uint32_t[4];

    // A thread's operand of one product: register j has the codes of nibbles j and 4 + j.
    // multipliers: of even and of odd registers, twice each; on SM90 those have two rows.
    __device__ __forceinline__ void decode(uint32_t word, const uint32_t (&multipliers)[2],
                                           Fragment& fragment) const {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            constexpr uint32_t codes = 0x000f000f, minus_136 = 0xc308c308;
            const uint32_t above_128 = (word >> 4 * j & codes) | numbers_from_128_;
            fragment[j] = ptx::mul_rn_bf16x2(ptx::add_rn_bf16x2(above_128, minus_136),
                                             multipliers[j % 2]);  //~ int4_row
        }
    }

 private:
    // An instruction holds one constant.
    uint32_t numbers_from_128_ = ptx::in_register(0x43004300);
};

}  // namespace deep_moe
