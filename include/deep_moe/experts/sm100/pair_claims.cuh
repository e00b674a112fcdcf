// Which pair of blocks a cluster takes next, as on SM90 (experts/block_claims.cuh). The weight
// loader of the even CTA claims while it loads the pair before, and tells all roles of both CTAs
// through a ring of slots in their shared memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/block_claims.cuh"
#include "deep_moe/experts/block_walk.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm100 {

// In the smallest tiles, which calls of few tokens have, a cluster may have two or three pairs.
// Then claims take longer than they gain (half a microsecond on a B200's clock, benchmarks/LOG.md).
// There a cluster takes every (number of clusters)-th pair.
template <class Config>
inline constexpr bool claims_pairs = Config::block_m > 16;

// Of the weight loader of the even CTA. All lanes call everything.
template <class Config>
class PairClaims {
    // So many k-blocks of a pair are still to be loaded when the next one is claimed, and when the
    // roles are told. Between the two the answer comes. Earlier, a pair would go to a cluster that
    // is not the first to be free.
    static constexpr uint32_t num_k_blocks_at_claim = 5;
    static constexpr uint32_t num_k_blocks_at_telling = 2;

 public:
    __device__ PairClaims(const SharedMemory<Config>& smem, const SymmBuffer<Config>& local)
        : smem_(smem), claims_(local) {}

    // Before each k-block is loaded. False after an abort.
    __device__ __forceinline__ bool before_k_block(uint32_t k_block_idx, uint32_t num_k_blocks,
                                                   Waiter& waiter) {
        if constexpr (!claims_pairs<Config>) return true;
        const uint32_t num_left = num_k_blocks - k_block_idx;
        if (num_left == min(num_k_blocks_at_claim, num_k_blocks)) claims_.claim();
        return num_left != min(num_k_blocks_at_telling, num_k_blocks) || tell(waiter);
    }

 private:
    __device__ bool tell(Waiter& waiter) {
        //~ slot_free
        if (!waiter.warp_mbarrier(WaitSite::pair_slot_free, smem_.pair_read_barriers(slot_.stage),
                                  slot_.parity ^ 1)) {
            return false;
        }
        const uint32_t pair_idx = claims_.take();
        if (ptx::lane_idx() < Config::cluster_size) {
            const uint32_t cta_rank = ptx::lane_idx();
            const uint32_t barrier =
                ptx::mapa_shared_cluster(smem_.pair_barriers(slot_.stage), cta_rank);
            ptx::mbarrier_arrive_expect_tx_shared_cluster(barrier, sizeof(uint32_t));
            const uint32_t word =
                ptx::mapa_shared_cluster(smem_.claimed_pairs(slot_.stage), cta_rank);
            // What a slot had before is smaller.
            ptx::red_async_max_u32(word, pair_idx, barrier);  //~ pair_told
        }
        __syncwarp();
        slot_.advance();
        return true;
    }

    const SharedMemory<Config> smem_;
    BlockClaims<Config> claims_;
    RingPosition<num_pair_slots<Config>> slot_;
};

// Of every warp that takes part in blocks: the pairs that its cluster takes, one after the other.
// All lanes call everything.
template <class Config>
class PairFollower {
 public:
    __device__ explicit PairFollower(const SharedMemory<Config>& smem)
        : smem_(smem), even_(smem.of_even_cta()) {}

    // Lets the walk go to the next pair. The first time it stands there already. False after an
    // abort.
    __device__ __forceinline__ bool follow(BlockWalk<Config>& walk, Waiter& waiter) {
        if (!is_behind_first_) return true;
        if constexpr (!claims_pairs<Config>) {
            pair_idx_ += Config::num_sms / Config::cluster_size;  //~ pair_dealt_out
            walk.go_to(pair_idx_);
            return true;
        }
        //~ pair_awaited
        if (!waiter.uniform_mbarrier(WaitSite::block_claim, smem_.pair_barriers(slot_.stage),
                                     slot_.parity)) {
            return false;
        }
        walk.go_to(ptx::uniform(ptx::ld_shared_u32(smem_.claimed_pairs(slot_.stage))));
        return true;
    }

    // Once behind each `follow`, by one warp for all those that have followed before a barrier.
    __device__ __forceinline__ void release() const {
        if (claims_pairs<Config> && is_behind_first_) {
            __syncwarp();
            if (ptx::elect_sync()) {
                //~ pair_read
                ptx::mbarrier_arrive_shared_cluster(even_.pair_read_barriers(slot_.stage));
            }
            __syncwarp();
        }
    }
    __device__ __forceinline__ void advance() {
        if (claims_pairs<Config> && is_behind_first_) slot_.advance();
        is_behind_first_ = true;
    }

    // All of it, by one warp for itself. False behind the last pair, or after an abort.
    __device__ __forceinline__ bool next(BlockWalk<Config>& walk, Block& block, Waiter& waiter) {
        if (!follow(walk, waiter)) return false;
        release();
        advance();
        return walk.find(block);
    }

 private:
    const SharedMemory<Config> smem_;
    const SharedMemory<Config> even_;
    RingPosition<num_pair_slots<Config>> slot_;
    uint32_t pair_idx_ = blockIdx.x / Config::cluster_size;  // where pairs are not claimed
    bool is_behind_first_ = false;
};

}  // namespace deep_moe::sm100
