// The SM100 kernel's arguments: tensor maps of all operands and of Linear1's output, and factors of
// weight rows. Maps of scales, and factors, are zero where there are none.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe::sm100 {

// Copies of tokens are of so many sizes: each of a quarter more of what a CTA has of a tile.
constexpr uint32_t num_token_boxes = 4;

struct alignas(64) KernelArgs : deep_moe::KernelArgs {
    TensorMap l1_activations[num_token_boxes];  // from the smallest copy on
    TensorMap l1_activation_sf;
    TensorMap l1_weights;
    TensorMap l1_weight_sf;
    TensorMap l1_output;
    TensorMap l2_activations[num_token_boxes];
    TensorMap l2_activation_sf;
    TensorMap l2_weights;
    TensorMap l2_weight_sf;
    // Those of the first expert, see experts/sm100/row_factors.cuh.
    const float* l1_row_factors;
    const float* l2_row_factors;
};

}  // namespace deep_moe::sm100
