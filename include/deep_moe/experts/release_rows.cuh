// Giving rows of the pool back. Dispatch writes them next, for the m-block that they belong to next
// (pull_tokens.cuh).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// Releases of an m-block, one by every CTA that had one of its Linear2 blocks, when no thread reads
// its rows any more. Linear1's reads are over before Linear2's begin.
template <class Config>
inline constexpr uint32_t num_releases =
    LinearOf<Config>::template num_pairs<Phase::linear2> * Config::cluster_size;

// A Linear2 block of this CTA has read what it needs in one of its m-block's pool blocks: its
// copies from the pool are complete, and what its warps load from there with ordinary instructions
// has arrived. One thread, ordered behind all of these. What the epilogue still has to store to
// other ranks does not count.
template <class Config>
__device__ __forceinline__ void release_pool_block(const SymmBuffer<Config>& local,
                                                   uint32_t pool_block_idx) {
    ptx::red_add_release_gpu(local.release_count(pool_block_idx), 1);  //~ rows_released
}

// The same for all pool blocks of the m-block: one by one, because those that follow them in the
// ring may be cut into m-blocks in another way. One converged warp.
template <class Config>
__device__ __forceinline__ void release_rows(const SymmBuffer<Config>& local,
                                             const BlockRows& block) {
    if (ptx::lane_idx() < block.num_rows / Config::block_m_step) {
        release_pool_block(local, block.pool_block_idx + ptx::lane_idx());
    }
    __syncwarp();
}

}  // namespace deep_moe
