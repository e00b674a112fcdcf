// How the epilogue warps share an accumulator: warpgroups split the columns of its tokens evenly,
// the four warps of a warpgroup its 128 lanes (weight rows), because a warp reaches only the 32
// lanes of its own quadrant.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/tcgen05.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm100 {

// Tokens that one TMEM load and one stmatrix handle.
constexpr uint32_t tokens_per_atom = 8;

// The two accumulators alternate; this is one of them as an epilogue warp sees it.
struct Accumulator {
    uint32_t tmem;           // first lane of the warp's quadrant, column of token 0
    uint32_t empty_barrier;  // in the even CTA, whose MMA warp waits

    // The warp's 32 weight rows of 8 tokens. Register i of values[h] belongs to weight row
    // 16*h + 8*(i/2) + lane/4 and token first_token + 2*(lane%4) + i%2. Whole warp.
    __device__ __forceinline__ void load(uint32_t first_token, float (&values)[2][4]) const {
        constexpr uint32_t lower_16_lanes = 16u << 16;
        ptx::tcgen05_ld_16x256b(tmem + first_token, values[0]);
        ptx::tcgen05_ld_16x256b(tmem + first_token + lower_16_lanes, values[1]);
        ptx::tcgen05_wait_ld(values);  //~ accumulator_loaded
    }

    // The same of the 16 rows of one h.
    __device__ __forceinline__ void load_half(uint32_t first_token, uint32_t h,
                                              float (&values)[1][4]) const {
        ptx::tcgen05_ld_16x256b(tmem + first_token + (h * 16u << 16), values[0]);  //~ half_loaded
        ptx::tcgen05_wait_ld(values);
    }

    // This warp has finished reading. Whole warp, once per block. The tcgen05 fences on both sides
    // order tensor memory; nothing else is handed over.
    __device__ __forceinline__ void release() const {
        ptx::tcgen05_fence_before_thread_sync();  //~ release_fence
        __syncwarp();
        if (ptx::elect_sync()) ptx::mbarrier_arrive_shared_cluster(empty_barrier);
        __syncwarp();
    }
};

// One epilogue warp, and the tokens that its warpgroup has of a block.
template <class Config>
struct EpilogueWarp {
    static constexpr uint32_t num_warps = Config::num_epilogue_warps;
    static constexpr uint32_t num_threads = num_warps * warp_size;
    static constexpr uint32_t num_warpgroups = num_warps / 4;
    static constexpr uint32_t warpgroup_threads = 4 * warp_size;
    // Most tiles that a warpgroup has of a block.
    static constexpr uint32_t max_tiles =
        ceil_div(ceil_div(Config::block_m, Config::store_block_m), num_warpgroups);
    static constexpr uint32_t atoms_per_tile = Config::store_block_m / tokens_per_atom;
    static_assert(num_warps == 4 || num_warps == 8, "num_epilogue_warps must be 4 or 8");
    static_assert(Config::store_block_m % tokens_per_atom == 0 &&
                      Config::block_m % Config::store_block_m == 0,
                  "store_block_m must be a multiple of 8 that divides block_m");

    uint32_t warp_idx;  // 0 .. num_epilogue_warps - 1
    uint32_t lane_idx;

    __device__ uint32_t warpgroup_idx() const { return warp_idx / 4; }
    __device__ uint32_t quadrant() const { return warp_idx % 4; }  // 32 TMEM lanes

    // Tokens of the block come in tiles of store_block_m, those with at least one valid token. The
    // first warpgroup has half of them, or one more than the second. This warpgroup's first token:
    __device__ uint32_t first_token(const Block& block) const {
        return warpgroup_idx() * num_first_tiles(block) * Config::store_block_m;
    }
    __device__ uint32_t num_tiles(const Block& block) const {
        const uint32_t num_first = num_first_tiles(block);
        return warpgroup_idx() == 0 ? num_first : num_block_tiles(block) - num_first;
    }

    __device__ void sync_warpgroup() const {
        ptx::bar_sync(NamedBarrier::first_epilogue_warpgroup, warpgroup_threads, warpgroup_idx());
    }
    __device__ void sync_all() const { ptx::bar_sync(NamedBarrier::epilogue, num_threads); }

 private:
    static __device__ uint32_t num_block_tiles(const Block& block) {
        return ceil_div(block.num_valid_rows, Config::store_block_m);
    }
    static __device__ uint32_t num_first_tiles(const Block& block) {
        return ceil_div(num_block_tiles(block), num_warpgroups);
    }
};

}  // namespace deep_moe::sm100
