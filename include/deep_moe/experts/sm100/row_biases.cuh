// The biases of an epilogue thread's weight rows.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm100/epilogue_warp.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"

namespace deep_moe::sm100 {

// [h][u]: of weight row 16*h + 8*u + lane/4 of the warp's 32, as Accumulator::load has them. In
// Linear1 u is 0 for gate and 1 for up.
struct RowBiases {
    float values[2][2];
};

// Zeros where there are no biases. The caller's weights were written before the kernel started, so
// no wait is needed. A CTA behind an odd last n-block finds zeros.
template <class Config>
__device__ __forceinline__ RowBiases load_row_biases(const KernelArgs& args,
                                                     const LinearOf<Config>& linear,
                                                     const Block& block,
                                                     const EpilogueWarp<Config>& warp) {
    RowBiases biases{};
    if constexpr (Config::Biases::exist) {
        const float* const rows = linear.biases(args) +
                                  linear.weight_block_row(block) * Config::block_n +
                                  warp.quadrant() * 32 + warp.lane_idx / 4;
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r)
            biases.values[r / 2][r % 2] = rows[8 * r];  //~ sm100_biases
    }
    return biases;
}

}  // namespace deep_moe::sm100
