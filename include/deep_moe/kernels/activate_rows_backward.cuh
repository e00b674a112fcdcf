// What the backward pass needs between its products: from Linear1's outputs and the gradient of the
// activation's output (that of a token whose routing weight is 1), in FP32,
//   the gradients of Linear1's outputs, times the routing weight,
//   the activation's output times the routing weight, for the gradient of Linear2's weights,
//   the gradient of the routing weight: the dot product of both, and of the bias and the gradient
//   of the layer's output.
// Padding rows zero.
//
// Grid: a warp per row.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/activations/elementary.cuh"
#include "deep_moe/training/chunk_values.cuh"
#include "deep_moe/training/expert_rows.cuh"

namespace deep_moe {

// Of all lanes, in all lanes, in the same order in every run. All 32 lanes.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (uint32_t lane_mask = 1; lane_mask < warp_size; lane_mask *= 2) {
        value += __shfl_xor_sync(full_warp, value, lane_mask);  //~ lanes_summed
    }
    return value;
}

template <class Config>
__device__ __forceinline__ void activate_rows_backward(const ActivateRowsBackwardArgs& args) {
    const uint32_t row = warp_in_grid<Config>();
    if (!is_used_row(args.rows, row)) return;
    const int32_t slot = args.rows.slot_of_row[row];
    uint4* const d_gate_row =
        static_cast<uint4*>(args.d_gate) + uint64_t{row} * args.d_stride_chunks;
    uint4* const d_up_row = static_cast<uint4*>(args.d_up) + uint64_t{row} * args.d_stride_chunks;
    const uint64_t output = uint64_t{row} * args.num_chunks;
    uint4* const activated_row = static_cast<uint4*>(args.activated) + output;
    if (slot < 0) {
        for (uint32_t i = ptx::lane_idx(); i < args.num_chunks; i += warp_size) {
            d_gate_row[i] = d_up_row[i] = activated_row[i] = uint4{};  //~ padding_has_no_gradient
        }
        return;
    }
    uint64_t expert = 0;
    if constexpr (Config::has_biases) {
        expert = expert_of_row(args.rows.offs, args.rows.num_experts, row);
    }
    const float weight = args.topk_weights[slot];
    const uint64_t input = uint64_t{row} * args.stride_chunks;
    const uint4* const gate_row = static_cast<const uint4*>(args.gate) + input;
    const uint4* const up_row = static_cast<const uint4*>(args.up) + input;
    const uint4* const d_activated_row = static_cast<const uint4*>(args.d_activated) + output;
    float d_weight = 0.0f;
    for (uint32_t chunk_idx = ptx::lane_idx(); chunk_idx < args.num_chunks;
         chunk_idx += warp_size) {
        ChunkValues gate = ChunkValues::of(gate_row[chunk_idx]);
        ChunkValues up = ChunkValues::of(up_row[chunk_idx]);
        const ChunkValues d_activated = ChunkValues::of(d_activated_row[chunk_idx]);
        if constexpr (Config::has_biases) {
            const uint64_t bias = expert * args.num_chunks * 8 + chunk_idx * 8;
            gate.add(args.gate_bias + bias);  //~ gate_bias_in_gradient
            up.add(args.up_bias + bias);      //~ up_bias_in_gradient
        }
        ChunkValues activated;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            const ActivationFactors factors =
                Config::Activation::factors(gate.values[i], up.values[i]);
            const float value = factors.gate.value * factors.up.value;
            const float d_value = d_activated.values[i];
            d_weight += value * d_value;           //~ weight_gradient
            activated.values[i] = value * weight;  //~ activated_weighted
            const float d_weighted = d_value * weight;
            gate.values[i] = d_weighted * factors.gate.slope * factors.up.value;  //~ gate_gradient
            up.values[i] = d_weighted * factors.up.slope * factors.gate.value;    //~ up_gradient
        }
        activated_row[chunk_idx] = activated.chunk();
        d_gate_row[chunk_idx] = gate.chunk();
        d_up_row[chunk_idx] = up.chunk();
    }
    if constexpr (Config::has_biases) {
        const uint64_t hidden_row = uint64_t{row} * args.num_hidden_chunks;
        for (uint32_t chunk_idx = ptx::lane_idx(); chunk_idx < args.num_hidden_chunks;
             chunk_idx += warp_size) {
            const ChunkValues d_row =
                ChunkValues::of(static_cast<const uint4*>(args.d_rows)[hidden_row + chunk_idx]);
            ChunkValues bias = {};
            bias.add(args.down_bias + (expert * args.num_hidden_chunks + chunk_idx) * 8);
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) {
                d_weight += bias.values[i] * d_row.values[i];  //~ down_bias_gradient
            }
        }
    }
    d_weight = warp_sum(d_weight);
    if (ptx::lane_idx() == 0) args.d_topk_weights[slot] = d_weight;
}

}  // namespace deep_moe
