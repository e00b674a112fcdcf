// Linear2's tokens have a scale for every 128 values, its accumulators have one for the whole sum.
// So an accumulator counts in units of the scale of the last k-block that it took in: before a
// block with another scale is added, it is multiplied by old / new. Scales are powers of two, so
// nothing is rounded, and no second set of accumulators is needed.
//
// The activation loader, which has time, works out these factors and puts them beside the tile.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sm90/shared_memory.cuh"

namespace deep_moe::sm90 {

// The ratio of two powers of two, given by their biased exponents, as a BF16. Never zero nor
// infinite: the product with an empty accumulator, before the first k-block, must be zero.
__device__ __forceinline__ uint16_t bf16_ratio(uint32_t old_exponent, uint32_t new_exponent) {
    const int32_t exponent = static_cast<int32_t>(old_exponent - new_exponent) + 127;
    return static_cast<uint16_t>(min(max(exponent, 1), 254) << 7);
}

// The activation loader's side. All lanes of its warp; each has every 32nd token of the block.
// Those behind the last valid one get some finite factor or other.
template <class Config>
class Rescaler {
    static constexpr uint32_t num_tokens_per_lane = ceil_div(Config::block_m, warp_size);

 public:
    // `scales`: those of the block's tokens for its first k-block.
    __device__ explicit Rescaler(const uint32_t* scales) : scales_(scales + ptx::lane_idx()) {}

    // Starts to read the scales of the next k-block; the values are first used by `store`.
    __device__ void load() {
#pragma unroll
        for (uint32_t i = 0; i < num_tokens_per_lane; ++i) {
            if (exists(i)) new_scales_[i] = scales_[i * warp_size];
        }
        scales_ += Config::num_padded_sf_pool_tokens;
    }

    // Its factors into its stage, which is empty. The caller's arrival on the stage's barrier,
    // after a __syncwarp, releases them.
    __device__ void store(const SharedMemory<Config>& smem, uint32_t stage) {
        const uint32_t row = ptx::lane_idx();
        const uint32_t word = row % 8 / 2 * (Config::block_m / 8) + row / 8;
        const uint32_t factors =
            smem.rescale_factors(stage) + word * sizeof(uint32_t) + row % 2 * sizeof(uint16_t);
#pragma unroll
        for (uint32_t i = 0; i < num_tokens_per_lane; ++i) {
            if (!exists(i)) continue;
            const uint32_t exponent = new_scales_[i] >> 23 & 0xff;
            ptx::st_shared_u16(factors + i * (warp_size / 8) * sizeof(uint32_t),
                               bf16_ratio(exponents_[i], exponent));
            exponents_[i] = exponent;
        }
    }

 private:
    __device__ static bool exists(uint32_t i) {
        return Config::block_m % warp_size == 0 ||
               i * warp_size + ptx::lane_idx() < Config::block_m;
    }

    const uint32_t* scales_;  // of the next k-block
    uint32_t exponents_[num_tokens_per_lane] = {};
    uint32_t new_scales_[num_tokens_per_lane];
};

// The math warps' side: multiplies the accumulators of 64 rows by the factors of a stage.
template <class Config, uint32_t num_accumulators>
__device__ __forceinline__ void rescale(const SharedMemory<Config>& smem, uint32_t stage,
                                        float (&accumulators)[num_accumulators]) {
    const uint32_t factors = smem.rescale_factors(stage) +
                             ptx::lane_idx() % 4 * (Config::block_m / 8) * sizeof(uint32_t);
#pragma unroll
    for (uint32_t i = 0; i < num_accumulators / 4; ++i) {
        const uint32_t pair = ptx::ld_shared_u32(factors + i * sizeof(uint32_t));
        const float first = __uint_as_float(pair << 16);
        const float second = __uint_as_float(pair & 0xffff0000u);
        accumulators[4 * i] *= first;
        accumulators[4 * i + 1] *= second;
        accumulators[4 * i + 2] *= first;
        accumulators[4 * i + 3] *= second;
    }
}

}  // namespace deep_moe::sm90
