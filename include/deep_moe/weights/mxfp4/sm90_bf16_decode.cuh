// From packed FP4 weights in shared memory to the register operand of a BF16 wgmma. A power of two
// for each group of 32 multiplies decoded values to their scale
// (deep_moe/weights/mxfp4/sm90_bf16_blocks.py).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"

namespace deep_moe::sm90 {

// What main_loop.cuh has to know of decoding: the register operands of its products, and what
// multiplies them.
class Bf16Decoder : public Bf16DecoderBase<4, 2>, public PowersOfTwo {
 public:
    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        return load_exponents(multipliers_at(part, thread_idx));
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        const uint32_t word = i == 0 ? packed.x : i == 1 ? packed.y : i == 2 ? packed.z : packed.w;
        const uint32_t (&multipliers)[2] = tables.multipliers[i / 2];  //~ bf16_group_scale
        values_.decode(word, multipliers, fragment);
    }

 private:
    E2m1ToBf16 values_;
};

}  // namespace deep_moe::sm90
