// Which block of the list a CTA takes next. Its first block is that of its own index. It claims
// each further block from a counter. So CTAs with shorter blocks take more of them, and at the end
// no CTA waits for one that had only long blocks. A cluster takes pairs of blocks in the same way:
// its first CTA claims, and tells the second (experts/sm90/cluster_claims.cuh,
// experts/sm100/pair_claims.cuh).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// Of one warp; all lanes call everything.
template <class Config>
class BlockClaims {
 public:
    __device__ explicit BlockClaims(const SymmBuffer<Config>& local)
        : num_claimed_(local.num_claimed_blocks()) {}

    // Once in each block. The answer takes a microsecond, and no warp waits for it until it is
    // needed.
    __device__ void claim() {
        if (ptx::lane_idx() == 0) claimed_ = ptx::atom_inc_relaxed_gpu(num_claimed_);  //~ claim
    }

    // What was claimed, in lane 0: by this warp, or by another one.
    __device__ uint32_t claimed() const { return claimed_; }
    __device__ void set_claimed(uint32_t claimed) { claimed_ = claimed; }

    // Where in the list the claimed block is, or the pair of blocks.
    __device__ uint32_t take() const {
        //~ claimed
        return Config::num_sms / Config::cluster_size + __shfl_sync(full_warp, claimed_, 0);
    }

 private:
    uint32_t* num_claimed_;
    uint32_t claimed_ = 0;  // lane 0's
};

}  // namespace deep_moe
