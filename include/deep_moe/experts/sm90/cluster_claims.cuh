// Which block of the list a CTA takes next. Its first block is that of its own index. It claims
// each further block from a counter. So CTAs with shorter blocks take more of them, and at the end
// no CTA waits for one that had only long blocks. A cluster takes pairs of blocks in the same way:
// its first CTA claims, and tells the second.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// Of one warp; all lanes call everything.
template <class Config>
class BlockClaims {
 public:
    // A claim is made while this many k-blocks of the block before are still to be loaded. The
    // answer takes a microsecond, and no warp waits for it until it is needed.
    static constexpr uint32_t num_k_blocks_ahead = 2;

    __device__ explicit BlockClaims(const SymmBuffer<Config>& local)
        : num_claimed_(local.num_claimed_blocks()) {}

    // Once in each block.
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

// The same of a warp in each CTA of a cluster. The second CTA's follows the first one's through its
// own shared memory.
template <class Config>
class ClusterClaims {
    using Slot = RingPosition<Config::num_block_slots>;

 public:
    static constexpr uint32_t num_k_blocks_ahead = BlockClaims<Config>::num_k_blocks_ahead;

    __device__ ClusterClaims(const SharedMemory<Config>& smem, const SymmBuffer<Config>& local)
        : smem_(smem), claims_(local) {}

    // Once in each block.
    __device__ void claim() {
        if (ptx::cluster_ctarank() == 0) claims_.claim();
    }

    // Where in the list the claimed pair is; `slot`: of the block before. False after an abort.
    __device__ bool take(const Slot& slot, uint32_t& pair_idx, Waiter& waiter) {
        const uint32_t word = smem_.claimed_blocks(slot.stage);
        const uint32_t barrier = smem_.claim_barriers(slot.stage);
        if (ptx::cluster_ctarank() == 0) {
            if (ptx::lane_idx() == 0) {
                // What a slot had before is smaller.
                ptx::red_async_max_u32(ptx::mapa_shared_cluster(word, 1), claims_.claimed(),
                                       ptx::mapa_shared_cluster(barrier, 1));  //~ claim_told
            }
            __syncwarp();
        } else {
            if (ptx::elect_sync()) ptx::mbarrier_arrive_expect_tx(barrier, sizeof(uint32_t));
            __syncwarp();
            //~ claim_awaited
            if (!waiter.warp_mbarrier(WaitSite::block_claim, barrier, slot.parity)) return false;
            claims_.set_claimed(ptx::ld_shared_u32(word));
        }
        pair_idx = claims_.take();
        return true;
    }

 private:
    const SharedMemory<Config>& smem_;
    BlockClaims<Config> claims_;
};

}  // namespace deep_moe::sm90
