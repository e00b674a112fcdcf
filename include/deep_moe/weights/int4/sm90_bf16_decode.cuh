// From packed INT4 weights in shared memory to the register operand of a BF16 wgmma
// (deep_moe/weights/int4/sm90_bf16_blocks.py).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/formats/int4_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm90 {

// What main_loop.cuh has to know of decoding: the register operands of its products, and what
// multiplies them.
class Int4Decoder : public Bf16DecoderBase<4, 4> {
 public:
    // Of a row half, for each group of 32 along k the scales of both rows.
    struct Tables {
        uint32_t groups[2];
    };
    struct Shifts {
        Tables row_halves[2];
    };

    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        const uint4 words = ptx::ld_shared_v4(multipliers_at(part, thread_idx));
        return {{{{words.x, words.y}}, {{words.z, words.w}}}};
    }

    template <uint32_t row_half>
    static __device__ __forceinline__ Tables tables(const Shifts& shifts) {
        return shifts.row_halves[row_half];
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        const uint32_t word = i == 0 ? packed.x : i == 1 ? packed.y : i == 2 ? packed.z : packed.w;
        const uint32_t scales = tables.groups[i / 2];  //~ int4_scale
        const uint32_t multipliers[2] = {ptx::prmt(scales, 0, 0x1010),
                                         ptx::prmt(scales, 0, 0x3232)};
        values_.decode(word, multipliers, fragment);
    }

 private:
    Int4ToBf16 values_;
};

}  // namespace deep_moe::sm90
