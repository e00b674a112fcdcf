// What the weight loader tells the CTA's other roles about the block that it claimed. It leaves a
// header for each block in shared memory, because the math warps hold accumulators in nearly all
// their registers, and the activation loader has few registers.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"

namespace deep_moe::sm90 {

// num_rows is 0 if there is no further block.
struct BlockHeader : BlockRows {
    uint32_t weight_block_row_idx;  // expert_idx * number of n-blocks + n_block_idx
    uint32_t n_block_idx;
};

// Rows are at most 256, so both numbers of them fit into a word with room to spare, and with a bit
// for is_reused.
__device__ __forceinline__ void store_header(uint32_t address, const BlockHeader& header) {
    //~ header_packed
    ptx::st_shared_v4(
        address,
        {header.weight_block_row_idx, header.n_block_idx << 1 | static_cast<uint32_t>(header.phase),
         header.pool_block_idx,
         uint32_t{header.is_reused} << 31 | header.num_rows << 16 | header.num_valid_rows});
}

// A whole warp. The shuffles make the values uniform in the compiler's eyes, without which it would
// take the wgmmas of a phase for a divergent path and wait after each.
template <class Config>
__device__ __forceinline__ BlockHeader load_header(uint32_t address) {
    constexpr bool wraps = PoolRing<Config>::wraps;  // else the bit is never set
    const uint4 words = ptx::ld_shared_v4(address);
    const uint32_t n_block_and_phase = __shfl_sync(full_warp, words.y, 0);
    const uint32_t num_rows = __shfl_sync(full_warp, words.w, 0);
    return {{static_cast<Phase>(n_block_and_phase & 1), __shfl_sync(full_warp, words.z, 0),
             wraps ? num_rows >> 16 & 0x7fff : num_rows >> 16, num_rows & 0xffff,
             wraps && num_rows >> 31 != 0},
            __shfl_sync(full_warp, words.x, 0),
            n_block_and_phase >> 1};
}

}  // namespace deep_moe::sm90
