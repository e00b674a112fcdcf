// Which block of the list a CTA takes next. Its first is the one of its own index; each further one
// it claims from a counter, so that CTAs whose blocks were shorter take more of them, and none
// waits at the end for one that had only long ones.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm90 {

// Of one warp; all lanes call everything.
template <class Config>
class BlockClaims {
 public:
    // A claim is made while so many k-blocks of the block before are still to be loaded: the answer
    // takes a microsecond, and until it is asked for nobody waits for it.
    static constexpr uint32_t num_k_blocks_ahead = 2;

    __device__ BlockClaims(const SymmBuffer<Config>& local, uint32_t cta_idx)
        : num_claimed_(local.num_claimed_blocks()), block_idx_(cta_idx) {}

    // Once in each block.
    __device__ void claim() {
        if (ptx::lane_idx() == 0) claimed_ = ptx::atom_inc_relaxed_gpu(num_claimed_);  //~ claim
    }

    // How far behind the block before in the list the claimed one is.
    __device__ uint32_t take() {
        //~ claimed
        const uint32_t block_idx = Config::num_sms + __shfl_sync(full_warp, claimed_, 0);
        const uint32_t distance = block_idx - block_idx_;
        block_idx_ = block_idx;
        return distance;
    }

 private:
    uint32_t* num_claimed_;
    uint32_t block_idx_;    // in the list
    uint32_t claimed_ = 0;  // lane 0's
};

}  // namespace deep_moe::sm90
