// From packed FP4 weights in shared memory to the register operand of a BF16 wgmma: a power of two
// for each group of 32 brings decoded values to where its scale says
// (deep_moe/weights/mxfp4/sm90_bf16_blocks.py).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"

namespace deep_moe::sm90 {

// What main_loop.cuh has to know of decoding: the register operands of its products, and what
// multiplies them.
class Bf16Decoder : public Bf16DecoderBase<4, 2> {
 public:
    // Of each row half a word: of its group of 32 along k and row h, the exponent in byte
    // 2*group + h.
    struct Shifts {
        uint32_t row_halves[2];
    };
    // Of the two rows of a row half, [group][h]: a power of two, twice.
    struct Tables {
        uint32_t multipliers[2][2];
    };

    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        const uint2 words = ptx::ld_shared_v2(multipliers_at(part, thread_idx));
        return {{words.x, words.y}};
    }

    template <uint32_t row_half>
    static __device__ __forceinline__ Tables tables(const Shifts& shifts) {
        Tables tables;
#pragma unroll
        for (uint32_t group = 0; group < 2; ++group) {
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h) {
                constexpr uint32_t exponent = 0x00800080;  // the lowest bit of both
                tables.multipliers[group][h] =
                    ptx::prmt(shifts.row_halves[row_half], 0, 0x4440 + 2 * group + h) * exponent;
            }
        }
        return tables;
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
