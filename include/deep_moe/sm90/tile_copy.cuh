// How a tile of tokens gets into a stage.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/scheduler.cuh"

namespace deep_moe::sm90 {

// The tensor copies that bring a tile of tokens: one box if all m-blocks are of one size, else
// boxes of half of the largest, as many as the m-block needs.
//
// Rows of the boxes behind the block's last token are filled with zeros. What other calls left
// there would do no harm, but multiplying it costs energy, and so up to 4 % of a call of 1024
// tokens or more. Tensor maps know where the pool ends, not where a block does: sm90_tensor_maps in
// jit/sm90_maps.py has coordinates that make them stop there.
template <class Config>
class TileCopy {
    static constexpr bool is_halved = Config::block_m_step != Config::block_m;
    static constexpr uint32_t box_rows = is_halved ? Config::block_m / 2 : Config::block_m;

 public:
    __device__ TileCopy(const KernelArgs& args, const BlockRows& block)
        : map_(block.phase == Phase::linear1 ? &args.l1_activations : &args.l2_activations),
          first_row_(block.pool_block_idx * Config::block_m_step),
          num_valid_rows_(block.num_valid_rows),
          has_second_box_(is_halved && block.num_rows > box_rows) {}

    __device__ uint32_t num_bytes() const {
        return (has_second_box_ ? Config::block_m : box_rows) * Config::block_k;
    }

    // One thread. `tile`: in shared memory; its bytes are counted on `barrier`.
    __device__ void start(uint32_t tile, uint32_t k_block_idx, uint32_t barrier) const {
        const auto copy = [&](uint32_t row) {
            ptx::cp_async_bulk_tensor_3d_shared_global(
                tile + row * Config::block_k, map_, barrier, k_block_idx * Config::block_k,
                Config::block_m - num_valid_rows_ + row, first_row_ + num_valid_rows_);
        };
        copy(0);
        if (has_second_box_) copy(box_rows);
    }

 private:
    const TensorMap* map_;
    uint32_t first_row_;
    uint32_t num_valid_rows_;
    bool has_second_box_;
};

}  // namespace deep_moe::sm90
