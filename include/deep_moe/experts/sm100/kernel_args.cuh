// What the host hands to the SM100 kernel: tensor maps of all that it multiplies, and of Linear1's
// output. Maps of scales are zero where there are none.
#pragma once

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe::sm100 {

struct alignas(64) KernelArgs : deep_moe::KernelArgs {
    TensorMap l1_activations;
    TensorMap l1_activation_sf;
    TensorMap l1_weights;
    TensorMap l1_weight_sf;
    TensorMap l1_output;
    TensorMap l2_activations;
    TensorMap l2_activation_sf;
    TensorMap l2_weights;
    TensorMap l2_weight_sf;
};

}  // namespace deep_moe::sm100
