// MXFP8 weights on SM90: blocks that the math warps decode to BF16 beside BF16 tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm90 {

// From MXFP8 weights in shared memory to the register operand of a BF16 wgmma. E4M3, shifted to
// BF16's exponent and mantissa, is the value times 2^-120, subnormals too. A power of two for
// each group of 32 multiplies it to its scale (deep_moe/weights/mxfp8/sm90_bf16_blocks.py).
class Mxfp8Decoder : public Bf16DecoderBase<8, 2>, public PowersOfTwo {
 public:
    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        return load_exponents(multipliers_at(part, thread_idx));
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        const bool is_first = i % mmas_per_unit == 0;
        const uint32_t rows[2] = {is_first ? packed.x : packed.z, is_first ? packed.y : packed.w};
        const uint32_t both = tables.multipliers[i / 2];
        const uint32_t multipliers[2] = {ptx::lower_half_twice(both), ptx::upper_half_twice(both)};
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            fragment[h] = scaled<0x9180>(rows[h], multipliers[h]);
            fragment[2 + h] = scaled<0xb3a2>(rows[h], multipliers[h]);  //~ mxfp8_second_pair
        }
    }

 private:
    // Two neighbours along k, which `selectors` names with the signs of their bytes.
    template <uint32_t selectors>
    static __device__ __forceinline__ uint32_t scaled(uint32_t bytes, uint32_t multiplier) {
        constexpr uint32_t mantissa_shift = 1 << 4, sign_and_number = 0x87f087f0;
        const uint32_t extended = ptx::prmt(bytes, 0, selectors);
        return ptx::mul_rn_bf16x2(extended * mantissa_shift & sign_and_number, multiplier);
    }
};

using Mxfp8Bf16Weights = Bf16DecodedWeights<Mxfp8Decoder>;

}  // namespace deep_moe::sm90
