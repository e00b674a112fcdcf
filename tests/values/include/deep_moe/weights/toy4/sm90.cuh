// Weights of four bits with a factor for each row, beside BF16 tokens. How a block lies:
// deep_moe/weights/toy4/sm90.py.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/plain_pull_policy.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/wgmma.cuh"

namespace deep_moe::sm90 {

struct Toy4Decoder {
    static constexpr uint32_t mmas_per_row_half = 4;
    static constexpr uint32_t mmas_per_unit = 4;
    static constexpr uint32_t part_bytes = 4096;
    // Nothing differs from k-block to k-block.
    struct Shifts {};
    struct Tables {};
    using Fragment = uint32_t[4];

    static __device__ Shifts load_shifts(uint32_t, uint32_t) { return {}; }
    template <uint32_t row_half>
    static __device__ Tables tables(const Shifts&) {
        return {};
    }

    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables&,
                                           Fragment& fragment) const {
        const uint32_t word = i == 0 ? packed.x : i == 1 ? packed.y : i == 2 ? packed.z : packed.w;
#pragma unroll
        for (uint32_t reg = 0; reg < 4; ++reg) fragment[reg] = decode_pair(word >> 8 * reg);
    }

    template <uint32_t num_accumulators>
    static __device__ __forceinline__ void multiply(float (&accumulators)[num_accumulators],
                                                    const Fragment& fragment, uint64_t tokens) {
        ptx::wgmma_m64k16_f32_bf16_bf16(accumulators, fragment, tokens);
    }

 private:
    // The lowest two nibbles. With its exponent and mantissa where those of a BF16 have their
    // lowest and highest bits, a value is 2^-126 times what it stands for.
    static __device__ __forceinline__ uint32_t decode_pair(uint32_t codes) {
        constexpr uint32_t two_to_126 = 0x7e807e80;
        const uint32_t magnitudes = (codes & 0x7) << 6 | (codes & 0x70) << 18;
        const uint32_t signs = (codes & 0x8) << 12 | (codes & 0x80) << 24;
        return ptx::mul_rn_bf16x2(magnitudes | signs, two_to_126);
    }
};

struct Toy4Weights {
    static constexpr uint32_t block_bytes = 2 * Toy4Decoder::part_bytes;
    static constexpr bool has_row_factors = true;
    static constexpr bool has_block_scales = false;
    static constexpr bool has_token_scales = false;
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = sm90::MainLoop<Config, Toy4Decoder>;
    template <class Config>
    using PullPolicy = PlainPullPolicy<Config>;
};

}  // namespace deep_moe::sm90
