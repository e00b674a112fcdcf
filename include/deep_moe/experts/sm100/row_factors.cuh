// The factors of an epilogue thread's weight rows, by which sums of products are multiplied.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm100/epilogue_warp.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"

namespace deep_moe::sm100 {

// As RowBiases. Where weights have none they are 1, which the compiler knows.
struct RowFactors {
    float values[2][2];
};

// Whether routing weights are applied behind Linear2, so that Linear2's inputs are those of weight
// 1. Then groups of E2M1 need no scales that depend on a token's weight.
template <class Config>
inline constexpr bool weighs_behind_linear2 =
    Config::Biases::exist || Config::Weights::values_per_element == 2;

// They stand behind an expert's scale words, as a further row of as many numbers as there are
// weight rows. A CTA behind an odd last n-block takes those of the last.
template <class Config>
__device__ __forceinline__ RowFactors load_row_factors(const KernelArgs& args,
                                                       const LinearOf<Config>& linear,
                                                       const Block& block,
                                                       const EpilogueWarp<Config>& warp) {
    RowFactors factors{{{1.0f, 1.0f}, {1.0f, 1.0f}}};
    if constexpr (Config::Weights::has_factors) {
        const uint32_t num_rows = linear.num_n_blocks() * Config::block_n;
        const uint32_t n_block_idx = min(block.n_block_idx, linear.num_n_blocks() - 1);
        const float* const rows =
            linear.row_factors(args) +
            uint64_t{block.expert_idx} * num_scale_rows<Config>(linear.num_k_blocks()) * num_rows +
            n_block_idx * Config::block_n + warp.quadrant() * 32 + warp.lane_idx / 4;
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r)
            factors.values[r / 2][r % 2] = rows[8 * r];  //~ sm100_row_factors
    }
    return factors;
}

}  // namespace deep_moe::sm100
