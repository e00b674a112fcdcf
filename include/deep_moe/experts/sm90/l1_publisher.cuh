// Publishes Linear1's output to Linear2: once a block's values are stored, its bit is set in the
// arrival mask of its tokens.
//
// The release waits until all stores have arrived: 1 us, and 3.4 us while weights are loaded as
// fast as memory gives them. The math warps do not have that time. So they record in shared memory
// that they have stored (SharedMemory::stored_barriers), and go on.
//
// With small tiles, whose blocks memory bounds, a warp of its own publishes: the last dispatch
// warp, while the others pull (Config::num_publish_warps). It has nothing else to do, so that no
// load waits for a release, nor a release for loads.
//
// With wider tiles, and in clusters, all dispatch warps pull, and the weight loader publishes. It
// does so when it has started so many loads of the CTA's next block that the next stage cannot be
// free before the epilogue is done. So it waits for nothing that it would not wait for anyway.
//
// Releases of rows by Linear2's blocks (release_rows.cuh) go the same ways.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/release_rows.cuh"
#include "deep_moe/experts/sm90/block_header.cuh"
#include "deep_moe/experts/sm90/loader_registers.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

template <class Config>
inline constexpr bool loader_publishes = Config::num_publish_warps == 0;

// One thread, ordered behind the stores of all math warps. Readers load the values with TMA, and
// put fence.proxy.async between their acquire and the first copy.
template <class Config>
__device__ void publish_l1_results(const SymmBuffer<Config>& local, const BlockHeader& block) {
    ptx::red_or_release_gpu(local.l2_arrival_mask(block.pool_block_idx, block.n_block_idx / 64),
                            uint64_t{1} << (block.n_block_idx % 64));
}

// When a block's values are stored: publishes them if they are Linear1's. Of a Linear2 block, whose
// stages have been read as well, releases the rows if others wait for them. One converged warp.
template <class Config>
__device__ __forceinline__ void publish_block(const SymmBuffer<Config>& local,
                                              const BlockHeader& block) {
    const bool is_idle = LinearOf<Config>(block.phase).is_idle(block.n_block_idx);
    //~ idle_unpublished
    if (block.phase == Phase::linear1 && !is_idle && ptx::elect_sync()) {
        if constexpr (has_few_loader_registers<Config>) {
            publish_l1_results(local.anew(), block);
        } else {
            publish_l1_results(local, block);
        }
    }
    __syncwarp();
    if constexpr (PoolRing<Config>::wraps) {
        if (block.phase == Phase::linear2 && block.is_reused) release_rows(local.anew(), block);
    }
}

// The part of a warp of its own: all blocks of this CTA, in order, or up to an abort.
template <class Config>
__device__ void publish_blocks(const SharedMemory<Config>& smem, const SymmBuffer<Config>& local,
                               Waiter& waiter) {
    for (RingPosition<Config::num_block_slots> slot;; slot.advance()) {
        if (!waiter.warp_mbarrier(WaitSite::block_header, smem.header_barriers(slot.stage),
                                  slot.parity)) {
            return;
        }
        const BlockHeader block = load_header<Config>(smem.block_headers(slot.stage));
        if (block.num_rows == 0) return;
        //~ own_results_stored
        if (!waiter.warp_mbarrier(WaitSite::results_stored, smem.stored_barriers(slot.stage),
                                  slot.parity)) {
            return;
        }
        if (ptx::lane_idx() == 0) ptx::mbarrier_arrive(smem.seen_barriers(slot.stage));
        publish_block(local, block);
    }
}

// The weight loader's part. Of one warp; all lanes call everything. Nothing is kept from block to
// block, for loaders have few registers: what a block is, the warp reads in the header that it has
// left itself.
template <class Config>
class L1Publisher {
    using Slot = RingPosition<Config::num_block_slots>;

 public:
    // Before the first header is written.
    __device__ L1Publisher(const SharedMemory<Config>& smem, const SymmBuffer<Config>& local)
        : smem_(smem), local_(local) {
        if constexpr (!loader_publishes<Config>) return;
        // In front of the first block stands none.
        if (ptx::lane_idx() == 0) store_header(smem_.block_headers(Slot{}.before().stage), {});
        __syncwarp();
    }

    // Before which load of a block the one before it in this CTA is to be published. Not later than
    // the first that needs a stage back from the block itself: math may be waiting for just what is
    // to be published.
    __device__ static uint32_t k_block_to_publish_at(uint32_t num_k_blocks) {
        return min(Config::num_stages, num_k_blocks - 1);  //~ publish_at
    }

    // Waits until the results of the block in the slot before this one are stored, and publishes
    // them. It waits for Linear2's, too, so that the barrier has a phase for every block and its
    // parity is that of the slots. False after an abort.
    __device__ bool publish(const Slot& slot, Waiter& waiter) {
        if constexpr (!loader_publishes<Config>) return true;
        const Slot done = slot.before();
        const BlockHeader block = load_header<Config>(smem_.block_headers(done.stage));
        if (block.num_rows == 0) return true;
        //~ results_stored
        const bool stored = waiter.warp_mbarrier(WaitSite::results_stored,
                                                 smem_.stored_barriers(done.stage), done.parity);
        // What the math warps' arrivals released, this releases to the GPU.
        if (stored) publish_block(local_, block);
        return stored;
    }

 private:
    const SharedMemory<Config>& smem_;
    const SymmBuffer<Config>& local_;
};

}  // namespace deep_moe::sm90
