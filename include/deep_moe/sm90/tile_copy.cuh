// How a tile of tokens gets into a stage.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/scheduler.cuh"

namespace deep_moe::sm90 {

// The tensor copies that bring a tile of tokens: one box if all m-blocks are of one size, else
// boxes of half of the largest, and of a step for what is beyond them.
template <class Config>
class TileCopy {
    static constexpr bool has_steps = Config::block_m_step != Config::block_m;
    static constexpr uint32_t box_rows = has_steps ? Config::block_m / 2 : Config::block_m;

 public:
    __device__ TileCopy(const KernelArgs& args, const BlockRows& block)
        : args_(args),
          is_linear1_(block.phase == Phase::linear1),
          first_row_(block.pool_block_idx * Config::block_m_step),
          num_rows_(block.num_rows) {}

    __device__ uint32_t num_bytes() const { return num_rows_ * Config::block_k; }

    // One thread. `tile`: in shared memory; its bytes are counted on `barrier`.
    __device__ void start(uint32_t tile, uint32_t k_block_idx, uint32_t barrier) const {
        const auto copy = [&](const TensorMap* map, uint32_t row) {
            ptx::cp_async_bulk_tensor_2d_shared_global(tile + row * Config::block_k, map, barrier,
                                                       k_block_idx * Config::block_k,
                                                       first_row_ + row);
        };
        const TensorMap* boxes = is_linear1_ ? &args_.l1_activations : &args_.l2_activations;
        copy(boxes, 0);
        if constexpr (has_steps) {
            if (num_rows_ == Config::block_m) {
                copy(boxes, box_rows);
            } else {
                const TensorMap* steps =
                    is_linear1_ ? &args_.l1_activation_steps : &args_.l2_activation_steps;
                for (uint32_t row = box_rows; row < num_rows_; row += Config::block_m_step) {
                    copy(steps, row);
                }
            }
        }
    }

 private:
    const KernelArgs& args_;
    bool is_linear1_;
    uint32_t first_row_;
    uint32_t num_rows_;
};

}  // namespace deep_moe::sm90
