// The stages that a CTA's operands go through, in shared memory, and the loader that fills them.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/products/args.cuh"
#include "deep_moe/products/product_tiles.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/sync/ring_position.cuh"

namespace deep_moe {

// Without a limit: nothing outside of the CTA takes part but the copies, which end or fault.
__device__ __forceinline__ void await_phase(uint32_t barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// A stage is a k-block of the tile's rows, then of its columns, each in rows of 128 bytes with the
// 128-byte swizzle. Behind all stages lie the barriers:
//   full   "A stage is loaded." The loader arrives (1) with the stage's bytes, the math warps wait;
//          first phase 0.
//   empty  "A stage may be loaded." Each math warp arrives when its products have read the stage,
//          the loader waits; the first round is granted.
template <class Config>
class OperandStages {
    static constexpr uint32_t x_bytes = Config::block_m * Config::block_k;
    static constexpr uint32_t weight_bytes = Config::block_n * Config::block_k;
    static constexpr uint32_t stage_bytes = x_bytes + weight_bytes;
    static constexpr uint32_t barriers_offset = Config::num_stages * stage_bytes;
    static_assert(Config::block_k == 128, "a k-block is one row of the swizzle");
    static_assert(x_bytes % 1024 == 0 && weight_bytes % 1024 == 0,
                  "operands begin where the swizzle does");
    static_assert(barriers_offset + Config::num_stages * 16 == Config::smem_bytes,
                  "smem_bytes is the stages and two barriers for each");

 public:
    using Ring = RingPosition<Config::num_stages>;

    __device__ explicit OperandStages(uint32_t shared_memory) : begin_(shared_memory) {}

    // One thread, before any other method.
    __device__ void init_barriers() const {
        for (uint32_t stage = 0; stage < Config::num_stages; ++stage) {
            ptx::mbarrier_init(full(stage), 1);
            ptx::mbarrier_init(empty(stage), Config::num_math_warps);  //~ product_empty_init
        }
        ptx::fence_mbarrier_init_release_cluster();
    }

    __device__ uint32_t x(uint32_t stage) const { return begin_ + stage * stage_bytes; }
    __device__ uint32_t weight(uint32_t stage) const { return x(stage) + x_bytes; }

    __device__ void await_loaded(const Ring& ring) const {
        await_phase(full(ring.stage), ring.parity);  //~ product_stage_awaited
    }
    // One lane of each math warp.
    __device__ void release(uint32_t stage) const { ptx::mbarrier_arrive(empty(stage)); }

    // One thread: all k-blocks of all tiles of the CTA. Rows of a box behind the expert's last one
    // are another's, or zero behind x; nobody stores what becomes of them.
    __device__ void load(const GroupedProductArgs& args) const {
        ProductTiles<Config> tiles(args);
        ProductTile tile;
        Ring ring;
        while (tiles.next(tile)) {
            for (uint32_t k_block = 0; k_block < args.num_k_blocks; ++k_block) {
                await_phase(empty(ring.stage), ring.parity ^ 1);  //~ product_stage_free
                const uint32_t barrier = full(ring.stage);
                ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes);
                ptx::cp_async_bulk_tensor_3d_shared_global(
                    x(ring.stage), &args.x, barrier, k_block * Config::block_k, tile.first_row, 0);
                ptx::cp_async_bulk_tensor_3d_shared_global(
                    weight(ring.stage), &args.weight, barrier, k_block * Config::block_k,
                    tile.n_block * Config::block_n, tile.expert);  //~ weight_of_expert
                ring.advance();
            }
        }
    }

 private:
    __device__ uint32_t full(uint32_t stage) const { return begin_ + barriers_offset + stage * 8; }
    __device__ uint32_t empty(uint32_t stage) const { return full(stage) + Config::num_stages * 8; }

    uint32_t begin_;
};

}  // namespace deep_moe
