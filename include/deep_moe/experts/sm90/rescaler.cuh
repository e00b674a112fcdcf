// Linear2's tokens have a scale for every 128 values, its accumulators have one for the whole sum.
// So an accumulator counts in units of the scale of the last k-block that it took in: before a
// block with another scale is added, it is multiplied by old / new. Scales are powers of two, so
// nothing is rounded, and no second set of accumulators is needed.
//
// That is rare: all k-blocks of a token have the same scale, except those whose values are too
// large or too small for it (formats/sm90_linear2_scale.cuh). The activation loader has time. It
// compares the scales, computes the factors, and writes both beside the tile.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm90 {

// The ratio of two powers of two as a BF16. Never infinite: a sum of zero must stay zero.
__device__ __forceinline__ uint16_t bf16_ratio(uint32_t old_scale, uint32_t new_scale) {
    const int32_t exponent = static_cast<int32_t>((old_scale >> 23) - (new_scale >> 23)) + 127;
    return static_cast<uint16_t>(min(max(exponent, 1), 254) << 7);
}

// Of the first k-block of a block: whether any other may change scales. Of these, only where that
// is so: whether the accumulators must be rescaled before the k-block is added. Written by one
// whole warp, read by all math warps.
template <class Config>
__device__ __forceinline__ void store_change_of_scale(const SharedMemory<Config>& smem,
                                                      uint32_t stage, bool changes) {
    if (ptx::lane_idx() == 0) ptx::st_shared_u32(smem.changes_of_scale(stage), changes);
}

// The shuffle makes the branch uniform in the compiler's eyes (see load_header).
template <class Config>
__device__ __forceinline__ bool changes_scale(const SharedMemory<Config>& smem, uint32_t stage) {
    return __shfl_sync(full_warp, ptx::ld_shared_u32(smem.changes_of_scale(stage)), 0) != 0;
}

// Whether a block's tokens have factors for their whole sums.
template <class Config>
inline constexpr bool has_token_factors =
    Config::Weights::has_token_scales && !Config::Weights::promotes_token_scales;

// The activation loader's side. All lanes of its warp; each has every 32nd token of the block.
// Nothing is kept from one k-block to the next, because this path is rare and registers are scarce.
template <class Config, bool has_factors = has_token_factors<Config>>
class Rescaler {
    static constexpr uint32_t num_tokens_per_lane = ceil_div(Config::block_m, warp_size);

 public:
    // `first_row`: of the block in the pool.
    __device__ Rescaler(const SymmBuffer<Config>& local, const BlockRows& block, uint32_t first_row)
        : scales_(local.l2_token_sf(0, first_row)), num_valid_rows_(block.num_valid_rows) {}

    // What a k-block behind the first asks for, into its stage, which is empty. The caller's
    // arrival on the stage's barrier, after a __syncwarp, releases it.
    __device__ void store(const SharedMemory<Config>& smem, uint32_t stage,
                          uint32_t k_block_idx) const {
        uint32_t old_scales[num_tokens_per_lane];
        uint32_t new_scales[num_tokens_per_lane];
        load(k_block_idx - 1, old_scales);
        load(k_block_idx, new_scales);
        bool changes = false;
#pragma unroll
        for (uint32_t i = 0; i < num_tokens_per_lane; ++i) {
            changes |= old_scales[i] != new_scales[i];
        }
        changes = __any_sync(full_warp, changes);
        if (changes) store_factors(smem, stage, old_scales, new_scales);
        store_change_of_scale(smem, stage, changes);
    }

    // The scales of a k-block, as f32 [block_m] in the block's slot.
    __device__ void store_scales(const SharedMemory<Config>& smem, uint32_t slot,
                                 uint32_t k_block_idx) const {
        const uint32_t token_factors = smem.l2_token_factors(slot);
        uint32_t scales[num_tokens_per_lane];
        load(k_block_idx, scales);
#pragma unroll
        for (uint32_t i = 0; i < num_tokens_per_lane; ++i) {
            const uint32_t row = i * warp_size + ptx::lane_idx();
            if (row < Config::block_m) {
                ptx::st_shared_u32(token_factors + row * sizeof(uint32_t), scales[i]);
            }
        }
    }

 private:
    // Behind the last valid token all scales are 1.
    __device__ void load(uint32_t k_block_idx, uint32_t (&scales)[num_tokens_per_lane]) const {
        const uint32_t* mine =
            scales_ + uint64_t{k_block_idx} * Config::Symm::l2_token_sf_dim1 + ptx::lane_idx();
#pragma unroll
        for (uint32_t i = 0; i < num_tokens_per_lane; ++i) {
            scales[i] = i * warp_size + ptx::lane_idx() < num_valid_rows_ ? mine[i * warp_size]
                                                                          : 127u << 23;
        }
    }

    __device__ void store_factors(const SharedMemory<Config>& smem, uint32_t stage,
                                  const uint32_t (&old_scales)[num_tokens_per_lane],
                                  const uint32_t (&new_scales)[num_tokens_per_lane]) const {
        const uint32_t row = ptx::lane_idx();
        const uint32_t word = row % 8 / 2 * Config::Smem::rescale_factors_dim2 + row / 8;
        const uint32_t factors =
            smem.rescale_factors(stage) + word * sizeof(uint32_t) + row % 2 * sizeof(uint16_t);
#pragma unroll
        for (uint32_t i = 0; i < num_tokens_per_lane; ++i) {
            if (i * warp_size + row >= Config::block_m) continue;
            ptx::st_shared_u16(factors + i * (warp_size / 8) * sizeof(uint32_t),
                               bf16_ratio(old_scales[i], new_scales[i]));
        }
    }

    const uint32_t* scales_;  // of the block's tokens for its first k-block
    uint32_t num_valid_rows_;
};

// Does nothing for tokens without scales, and where the main loop multiplies by them.
template <class Config>
class Rescaler<Config, false> {
 public:
    __device__ Rescaler(const SymmBuffer<Config>&, const BlockRows&, uint32_t) {}
    __device__ void store(const SharedMemory<Config>&, uint32_t, uint32_t) const {}
    __device__ void store_scales(const SharedMemory<Config>&, uint32_t, uint32_t) const {}
};

// The math warps' side: multiplies the accumulators of 64 rows by the factors of a stage.
template <class Config, uint32_t num_accumulators>
__device__ __forceinline__ void rescale(const SharedMemory<Config>& smem, uint32_t stage,
                                        float (&accumulators)[num_accumulators]) {
    const uint32_t factors = smem.rescale_factors(stage) + ptx::lane_idx() % 4 *
                                                               Config::Smem::rescale_factors_dim2 *
                                                               sizeof(uint32_t);
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
