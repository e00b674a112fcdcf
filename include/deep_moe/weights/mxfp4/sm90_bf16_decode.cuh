// From packed FP4 weights in shared memory to the register operand of a BF16 wgmma.
//
// A weight block is 256 rows x 64 k as the host shuffled it
// (deep_moe/weights/mxfp4/sm90_bf16_blocks.py): for each of the two math warpgroups 4096 bytes of
// nibbles and 256 bytes of multipliers. A thread has 4 rows, and of each 16 along k the four that a
// product takes from it.
//
// FP4 becomes BF16 by a byte permute and a product. The permute puts the magnitude's three bits
// where the lowest of the exponent and the highest of the mantissa are, which is the value times
// 2^-126, 0.5 as a subnormal too. The product with a power of two brings it to where its group's
// scale says, and rounds nothing.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/ptx/registers.cuh"
#include "deep_moe/ptx/wgmma.cuh"

namespace deep_moe::sm90 {

// What main_loop.cuh has to know of decoding: the register operands of its products, and what
// multiplies them.
class Bf16Decoder {
 public:
    static constexpr uint32_t mmas_per_row_half = 4;
    static constexpr uint32_t mmas_per_unit = 4;  // whose weights a thread loads with 16 bytes
    static constexpr uint32_t part_bytes = 4096 + 256;  // of one warpgroup
    // Of a thread's rows for each group of 32 along k, a byte each: row h of row half b in byte
    // 2*b + h.
    struct Shifts {
        uint32_t groups[2];
    };
    // Of the two rows of a row half, [group][h]: a power of two, twice.
    struct Tables {
        uint32_t multipliers[2][2];
    };
    using Fragment = uint32_t[4];

    // The four threads of a row have the same.
    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        constexpr uint32_t offset = 4096;  // behind the nibbles
        const uint2 words = ptx::ld_shared_v2(part + offset + thread_idx / 4 * sizeof(uint2));
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
                    ptx::prmt(shifts.groups[group], 0, 0x4440 + 2 * row_half + h) * exponent;
            }
        }
        return tables;
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit. Of a word,
    // bits 0 and 1 of every nibble are selectors of the first two neighbours of both rows, bits 2
    // and 3 those of the two 8 further along k. Bit 2 of a selector names the table.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        constexpr uint32_t upper_tables = 0x40404040;
        const uint32_t word = i == 0 ? packed.x : i == 1 ? packed.y : i == 2 ? packed.z : packed.w;
        const uint32_t (&multipliers)[2] = tables.multipliers[i / 2];  //~ bf16_group_scale
        const uint32_t first = (word & pair_bits_) | upper_tables;
        const uint32_t second = (word >> 2 & pair_bits_) | upper_tables;  //~ bf16_second_pairs
        fragment[0] = scaled(first, multipliers[0]);
        fragment[1] = scaled(first >> 16, multipliers[1]);
        fragment[2] = scaled(second, multipliers[0]);
        fragment[3] = scaled(second >> 16, multipliers[1]);  //~ bf16_upper_selectors
    }

    template <uint32_t num_accumulators>
    static __device__ __forceinline__ void multiply(float (&accumulators)[num_accumulators],
                                                    const Fragment& fragment, uint64_t tokens) {
        ptx::wgmma_m64k16_f32_bf16_bf16(accumulators, fragment, tokens);
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

}  // namespace deep_moe::sm90
