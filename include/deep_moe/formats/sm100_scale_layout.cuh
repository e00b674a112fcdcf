// Where a token's scale words stand, so that tcgen05 can use them as they lie.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe::sm100 {

// Scale words are stored MN-major, one column per token; each pool block has whole groups of 128
// columns. Inside a group, row r stands at (r%32)*4 + r/32: a copy to TMEM takes 16 bytes per lane,
// and lane l holds rows l, l+32, l+64 and l+96 in its four columns.
template <class Config>
__device__ __forceinline__ uint32_t sf_pool_token_idx(uint32_t pool_block_idx, uint32_t row) {
    const uint32_t group = row / 128;
    const uint32_t row_in_group = row % 128;
    return PoolRing<Config>::place_of(pool_block_idx) * align_up(Config::block_m, 128u) +
           group * 128 + (row_in_group % 32) * 4 + row_in_group / 32;
}

}  // namespace deep_moe::sm100
