// What a cluster's CTAs take next: the first CTA claims, and tells the second.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block_claims.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// A block is claimed while this many k-blocks of the one before are still to be loaded.
constexpr uint32_t num_claim_k_blocks = 2;

// Of a warp in each CTA of a cluster, as BlockClaims. The second CTA's follows the first one's
// through its own shared memory.
template <class Config>
class ClusterClaims {
    using Slot = RingPosition<Config::num_block_slots>;

 public:
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
