// Publishes Linear1's output to Linear2: once a block's values are stored, its bit is set in the
// arrival mask of its tokens.
//
// The release waits until all stores have arrived, a microsecond or more. The weight loader has
// that time, and the math warps do not. So the math warps record in shared memory that they have
// stored (SharedMemory::stored_barriers), and go on. The loader publishes when it has started so
// many loads of the CTA's next block that the next stage cannot be free before the epilogue is
// done. So it waits for nothing that it would not wait for anyway.
//
// With the smallest tiles math publishes instead. Math then waits for weights most of the time, and
// Linear2 waits for the publication. The loader would bring it late, because its release also seems
// to wait for the warp's loads. There thread 0 of the math warps publishes.
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

// Measured on an H200: with 8 rows math is faster by 5 to 7 % for one token and by up to 2 % for
// 32; with 16 to 32 rows they are even, beyond that the loader leads.
template <class Config>
inline constexpr bool math_publishes = Config::block_m <= 8;

// One thread, ordered behind the stores of all math warps. Readers load the values with TMA, and
// put fence.proxy.async between their acquire and the first copy.
template <class Config>
__device__ void publish_l1_results(const SymmBuffer<Config>& local, const BlockHeader& block) {
    ptx::red_or_release_gpu(local.l2_arrival_mask(block.pool_block_idx, block.n_block_idx / 64),
                            uint64_t{1} << (block.n_block_idx % 64));
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
        if constexpr (math_publishes<Config>) return;
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

    // Waits until the results of the block in the slot before this one are stored. Publishes them
    // if they are Linear1's. It waits for Linear2's, too, so that the barrier has a phase for every
    // block and its parity is that of the slots. After that the block's stages have been read as
    // well: if others wait for the rows of a Linear2 block, they are released here. False after an
    // abort.
    __device__ bool publish(const Slot& slot, Waiter& waiter) {
        if constexpr (math_publishes<Config>) return true;
        const Slot done = slot.before();
        const BlockHeader block = load_header<Config>(smem_.block_headers(done.stage));
        if (block.num_rows == 0) return true;
        //~ results_stored
        const bool stored = waiter.warp_mbarrier(WaitSite::results_stored,
                                                 smem_.stored_barriers(done.stage), done.parity);
        // What the math warps' arrivals released, this releases to the GPU.
        const bool is_idle = LinearOf<Config>(block.phase).is_idle(block.n_block_idx);
        //~ idle_unpublished
        if (stored && block.phase == Phase::linear1 && !is_idle && ptx::elect_sync()) {
            if constexpr (has_few_loader_registers<Config>) {
                publish_l1_results(local_.anew(), block);
            } else {
                publish_l1_results(local_, block);
            }
        }
        __syncwarp();
        if constexpr (PoolRing<Config>::wraps) {
            if (stored && block.phase == Phase::linear2 && block.is_reused) {
                release_rows(local_.anew(), block);
            }
        }
        return stored;
    }

 private:
    const SharedMemory<Config>& smem_;
    const SymmBuffer<Config>& local_;
};

}  // namespace deep_moe::sm90
