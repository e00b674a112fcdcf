// MXFP4 weights on SM90: blocks that the math warps decode, to E5M2 beside E4M3 tokens, to BF16
// beside BF16 tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/sm90_pull_policy.cuh"
#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/formats/e2m1_to_bf16.cuh"
#include "deep_moe/weights/mxfp4/sm90_e5m2_decode.cuh"

namespace deep_moe::sm90 {

struct Mxfp4Weights {
    static constexpr uint32_t block_bytes = 2 * E5m2Decoder::part_bytes;
    // A factor for each row; what its groups of 32 differ in lies in the block.
    static constexpr bool has_row_factors = true;
    static constexpr bool has_block_scales = false;
    static constexpr bool has_token_scales = true;
    static constexpr bool promotes_token_scales = false;

    template <class Config>
    using MainLoop = sm90::MainLoop<Config, E5m2Decoder>;
    template <class Config>
    using PullPolicy = sm90::PullPolicy<Config>;
};

// From packed FP4 weights in shared memory to the register operand of a BF16 wgmma. A power of
// two for each group of 32 multiplies decoded values to their scale
// (deep_moe/weights/mxfp4/sm90_bf16_blocks.py).
class Bf16Decoder : public Bf16DecoderBase<4, 2>, public PowersOfTwo {
 public:
    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        return load_exponents(multipliers_at(part, thread_idx));
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        const uint32_t multipliers = tables.multipliers[i / 2];  //~ bf16_group_scale
        values_.decode(word_of(packed, i), multipliers, fragment);
    }

 private:
    E2m1ToBf16 values_;
};

using Mxfp4Bf16Weights = Bf16DecodedWeights<Bf16Decoder>;

}  // namespace deep_moe::sm90
