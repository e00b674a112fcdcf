// How a tile of tokens gets into a stage.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm90/kernel_args.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"

namespace deep_moe::sm90 {

// The tensor copy that brings a tile of tokens: a box of block_m rows, for smaller m-blocks too.
//
// Rows of the box behind the block's last token are filled with zeros. What other calls left
// there would do no harm, but multiplying it costs energy, and so up to 4 % of a call of 1024
// tokens or more. Tensor maps know where the pool ends, not where a block does: sm90_tensor_maps in
// deep_moe/targets/sm90_weights.py has coordinates that make them stop there.
template <class Config>
class TileCopy {
 public:
    static constexpr uint32_t num_bytes = Config::Smem::activations_stride;  //~ box_bytes

    __device__ TileCopy(const KernelArgs& args, const BlockRows& block)
        : map_(&LinearOf<Config>(block.phase).activations(args)),
          first_row_(PoolRing<Config>::first_row(block.pool_block_idx)),
          num_valid_rows_(block.num_valid_rows) {}  //~ end_of_block

    // One thread. `tile`: in shared memory; its bytes are counted on `barrier`.
    __device__ void start(uint32_t tile, uint32_t k_block_idx, uint32_t barrier) const {
        ptx::cp_async_bulk_tensor_3d_shared_global(tile, map_, barrier,
                                                   k_block_idx * Config::block_k,
                                                   Config::block_m - num_valid_rows_,  //~ box_begin
                                                   first_row_ + num_valid_rows_);
    }

 private:
    const TensorMap* map_;
    uint32_t first_row_;
    uint32_t num_valid_rows_;
};

}  // namespace deep_moe::sm90
