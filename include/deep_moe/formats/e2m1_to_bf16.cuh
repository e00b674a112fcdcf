// E2M1 to BF16, in registers.
//
// A byte permute and a product. The permute puts the magnitude's three bits where BF16 has the
// lowest bit of the exponent and the highest of the mantissa. That is the value times 2^-126; 0.5
// becomes a subnormal. The product with a scale brings it to its range. It rounds nothing where
// both together have no more bits than BF16.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/ptx/registers.cuh"

namespace deep_moe {

class E2m1ToBf16 {
 public:
    using Fragment = uint32_t[4];

    // A thread's operand of one product. Of `word`, bits 0 and 1 of every nibble are selectors of
    // the first two registers, bits 2 and 3 those of the other two
    // (deep_moe/targets/sm90/e2m1_blocks.py). Bit 2 of a selector names the table. multipliers: of
    // even registers in the lower half, of odd ones in the upper; on SM90 those have a row each.
    __device__ __forceinline__ void decode(uint32_t word, uint32_t multipliers,
                                           Fragment& fragment) const {
        constexpr uint32_t upper_tables = 0x40404040;
        const uint32_t first = (word & pair_bits_) | upper_tables;
        const uint32_t second = (word >> 2 & pair_bits_) | upper_tables;  //~ bf16_second_pairs
        const uint32_t even = ptx::lower_half_twice(multipliers);
        const uint32_t odd = ptx::upper_half_twice(multipliers);
        fragment[0] = scaled(first, even);
        fragment[1] = scaled(first >> 16, odd);
        fragment[2] = scaled(second, even);
        fragment[3] = scaled(second >> 16, odd);  //~ bf16_upper_selectors
    }

 private:
    // Two neighbours along k, of pairs of bits in the lower 16 bits of `selectors`: the lower byte
    // of a BF16 has the lower pair in its highest bits; the upper byte has the sign in its highest
    // bit and the upper pair's other bit in its lowest.
    __device__ __forceinline__ uint32_t scaled(uint32_t selectors, uint32_t multiplier) const {
        constexpr uint32_t upper_bytes = 0x81800100;
        return ptx::mul_rn_bf16x2(ptx::prmt(lower_bytes_, upper_bytes, selectors), multiplier);
    }

    // An instruction holds one constant: others, if the compiler knows them, are brought to a
    // register anew for each, and masks are applied by an instruction of their own.
    uint32_t pair_bits_ = ptx::in_register(0x33333333);
    uint32_t lower_bytes_ = ptx::in_register(0xc0804000);
};

}  // namespace deep_moe
