// What all weights that are decoded to BF16 beside BF16 tokens have in common.
//
// A weight block is 256 rows x 64 k as the host laid it out
// (deep_moe/targets/sm90/decoded_blocks.py): for each of the two math warpgroups its values, then
// what multiplies them, a group along k after the other. A thread has 4 rows, and of each 16 along
// k the four that a product takes from it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/conditional.cuh"
#include "deep_moe/dispatch/plain_pull_policy.cuh"
#include "deep_moe/experts/sm90/eight_row_loop.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/ptx/wgmma.cuh"

namespace deep_moe::sm90 {

// value_bits: of a weight. multiplier_bytes: of each row, of a block's multipliers.
template <uint32_t value_bits, uint32_t multiplier_bytes>
struct Bf16DecoderBase {
    static constexpr uint32_t num_rows = 128;  // of one warpgroup
    static constexpr uint32_t block_k = 64;
    static constexpr uint32_t value_bytes = num_rows * block_k * value_bits / 8;
    static constexpr uint32_t part_bytes = value_bytes + num_rows * multiplier_bytes;
    // Of a thread's 4 rows. The four threads of a row have the same.
    static constexpr uint32_t thread_multiplier_bytes = 4 * multiplier_bytes;

    static constexpr uint32_t mmas_per_row_half = 4;
    static constexpr uint32_t mmas_per_unit = 16 / value_bits;  // whose weights are 16 bytes
    using Fragment = uint32_t[4];

    static __device__ __forceinline__ uint32_t multipliers_at(uint32_t part, uint32_t thread_idx) {
        return part + value_bytes + thread_idx / 4 * thread_multiplier_bytes;
    }

    // Of a unit of four products, a word each: the i-th, which the compiler has to know.
    static __device__ __forceinline__ uint32_t word_of(const uint4& packed, uint32_t i) {
        return i == 0 ? packed.x : i == 1 ? packed.y : i == 2 ? packed.z : packed.w;
    }

    template <uint32_t num_accumulators>
    static __device__ __forceinline__ void multiply(float (&accumulators)[num_accumulators],
                                                    const Fragment& fragment, uint64_t tokens) {
        ptx::wgmma_m64k16_f32_bf16_bf16(accumulators, fragment, tokens);
    }
};

// Multipliers that are powers of two, one for each group of 32 along k
// (deep_moe/targets/sm90/ue8m0_scales.py).
struct PowersOfTwo {
    // Of each row half a word: of its group of 32 along k and row h, the exponent in byte
    // 2*group + h.
    struct Shifts {
        uint32_t row_halves[2];
    };
    // Of each group a power of two for both rows of a row half, row h's in half h.
    struct Tables {
        uint32_t multipliers[2];
    };

    static __device__ __forceinline__ Shifts load_exponents(uint32_t address) {
        const uint2 words = ptx::ld_shared_v2(address);
        return {{words.x, words.y}};
    }

    template <uint32_t row_half>
    static __device__ __forceinline__ Tables tables(const Shifts& shifts) {
        Tables tables;
#pragma unroll
        for (uint32_t group = 0; group < 2; ++group) {
            constexpr uint32_t exponent = 1 << 7;  // its lowest bit
            tables.multipliers[group] =
                ptx::prmt(shifts.row_halves[row_half], 0, 0x4140 + group * 0x0202) * exponent;
        }
        return tables;
    }
};

// Multipliers of any other kind, two words for the two rows of a row half.
struct MultiplierWords {
    struct Tables {
        uint32_t words[2];
    };
    struct Shifts {
        Tables row_halves[2];
    };

    static __device__ __forceinline__ Shifts load_words(uint32_t address) {
        const uint4 words = ptx::ld_shared_v4(address);
        return {{{{words.x, words.y}}, {{words.z, words.w}}}};
    }

    template <uint32_t row_half>
    static __device__ __forceinline__ Tables tables(const Shifts& shifts) {
        return shifts.row_halves[row_half];
    }
};

// The policy of such weights.
template <class Decoder>
struct Bf16DecodedWeights {
    static constexpr uint32_t block_bytes = 2 * Decoder::part_bytes;
    // A factor for each row; what its groups differ in lies in the block.
    static constexpr bool has_row_factors = true;
    static constexpr bool has_block_scales = false;
    // Nor has Linear1's output.
    static constexpr bool has_token_scales = false;
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = conditional_t<Config::block_m == 8, EightRowLoop<Config, Decoder>,
                                   sm90::MainLoop<Config, Decoder>>;
    template <class Config>
    using PullPolicy = PlainPullPolicy<Config>;
};

}  // namespace deep_moe::sm90
