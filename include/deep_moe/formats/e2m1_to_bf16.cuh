// E2M1 to BF16, in registers.
//
// A mask and a product. The mask keeps of a word that is rotated the sign, and the magnitude's
// three bits where BF16 has the lowest two of the exponent and the highest of the mantissa. That is
// the value times 2^-126; 0.5 becomes a subnormal. The product with a scale brings it to its range.
// It rounds nothing where both together have no more bits than BF16.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/ptx/registers.cuh"

namespace deep_moe {

class E2m1ToBf16 {
 public:
    using Fragment = uint32_t[4];

    // A thread's operand of one product, of a word as the host laid it out
    // (deep_moe/targets/sm90/e2m1_blocks.py). multipliers: of even registers in the lower half, of
    // odd ones in the upper; on SM90 those have a row each.
    __device__ __forceinline__ void decode(uint32_t word, uint32_t multipliers,
                                           Fragment& fragment) const {
        constexpr uint32_t value_bits = 0x81c081c0, upper_exponent_bit = 0x01000100;
        const uint32_t even = ptx::lower_half_twice(multipliers);
        const uint32_t odd = ptx::upper_half_twice(multipliers);
        const uint32_t first_odd =
            (ptx::rotate_left(word, 10) & upper_exponent_bit) |
            (word * two_bits_ & (value_bits & ~upper_exponent_bit));  //~ e2m1_split_value
        fragment[0] = ptx::mul_rn_bf16x2(word * six_bits_ & value_bits, even);
        fragment[1] = ptx::mul_rn_bf16x2(first_odd, odd);
        fragment[2] = ptx::mul_rn_bf16x2(ptx::rotate_left(word, 12) & value_bits, even);
        fragment[3] = ptx::mul_rn_bf16x2(word & value_bits, odd);  //~ e2m1_odd_scale
    }

 private:
    // Shifts by a product, where the pipe of masks and shifts is busy: of a constant the compiler
    // would make a shift, and with the widest tiles have too few registers.
    uint32_t two_bits_ = ptx::in_register(1 << 2);
    uint32_t six_bits_ = ptx::in_register(1 << 6);
};

}  // namespace deep_moe
