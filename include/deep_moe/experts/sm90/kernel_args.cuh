// The SM90 kernel's arguments. Weights are plain bytes. Their scales are factors, of each row, or
// of parts of a block ([num_l1_k_blocks][2][2] in place of [block_n]), as Config::Weights says;
// otherwise null.
#pragma once

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe::sm90 {

// E: the rank's routed experts, then the shared ones.
struct alignas(64) KernelArgs : deep_moe::KernelArgs {
    TensorMap l1_activations;
    TensorMap l2_activations;
    const void* l1_weight_blocks;  // [E][num_l1_n_blocks][num_l1_k_blocks][block_bytes]
    const void* l2_weight_blocks;  // [E][num_l2_n_blocks][num_l2_k_blocks][block_bytes]
    const float* l1_row_factors;   // [E][num_l1_n_blocks][block_n]
    const float* l2_row_factors;   // [E][num_l2_n_blocks][block_n]
};

}  // namespace deep_moe::sm90
