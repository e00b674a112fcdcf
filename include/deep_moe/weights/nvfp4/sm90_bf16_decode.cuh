// From packed NVFP4 weights in shared memory to the register operand of a BF16 wgmma: a multiplier
// for each group of 16 along k, which is one product
// (deep_moe/weights/nvfp4/sm90_bf16_blocks.py). Two significant bits of a value times four of its
// scale are exact in BF16.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm90 {

// What main_loop.cuh has to know of decoding: the register operands of its products, and what
// multiplies them.
class Nvfp4Decoder : public Bf16DecoderBase<4, 4> {
 public:
    // Of a row half, a word for each two products: of product i and row h, a byte of 5 bits of
    // exponent and 3 of mantissa, in byte 2*(i % 2) + h.
    struct Tables {
        uint32_t words[2];
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
        // The bytes of both rows, each to where BF16 has its lowest bits of exponent and its
        // highest of mantissa, beneath the exponent's upper three.
        constexpr uint32_t mantissa_shift = 1 << 4, upper_exponent = 0x70007000;
        const uint32_t bytes =
            ptx::prmt(tables.words[i / 2], 0, i % 2 == 0 ? 0x4140 : 0x4342);  //~ nvfp4_scale
        const uint32_t both = bytes * mantissa_shift + upper_exponent;
        const uint32_t multipliers[2] = {ptx::prmt(both, 0, 0x1010), ptx::prmt(both, 0, 0x3232)};
        values_.decode(word, multipliers, fragment);
    }

 private:
    E2m1ToBf16 values_;
};

}  // namespace deep_moe::sm90
