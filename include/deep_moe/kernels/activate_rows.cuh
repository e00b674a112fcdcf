// Linear2's input: the activation of Linear1's two outputs in FP32, with biases added first.
// Padding rows are zero. With `rounds_to_mxfp8` the values are rounded as MXFP8 holds them. With
// `quantizes` they are E4M3 with a float32 scale for every 128.
//
// Grid: a warp per row.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/training/chunk_values.cuh"
#include "deep_moe/training/expert_rows.cuh"
#include "deep_moe/training/mxfp8_rounding.cuh"
#include "deep_moe/training/quantized_rows.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void activate_rows(const ActivateRowsArgs& args) {
    const uint32_t row = warp_in_grid<Config>();
    if (!is_used_row(args.rows, row)) return;
    const bool is_padding = args.rows.slot_of_row[row] < 0;
    uint64_t bias = 0;  // where the expert's begin
    if constexpr (Config::has_biases) {
        const uint64_t expert = expert_of_row(args.rows.offs, args.rows.num_experts, row);
        bias = expert * args.num_chunks * 8;
    }
    const uint64_t input = uint64_t{row} * args.stride_chunks;
    const uint4* const gate_row = static_cast<const uint4*>(args.gate) + input;
    const uint4* const up_row = static_cast<const uint4*>(args.up) + input;
    uint8_t* const activated =
        static_cast<uint8_t*>(args.activated) +
        uint64_t{row} * (Config::quantizes ? quantized_row_bytes(args.num_chunks)
                                           : args.num_chunks * sizeof(uint4));
    for (uint32_t first = 0; first < args.num_chunks; first += warp_size) {
        const uint32_t chunk_idx = first + ptx::lane_idx();
        const bool is_valid = chunk_idx < args.num_chunks;
        uint4 chunk = {};
        if (is_valid && !is_padding) {  //~ padding_not_activated
            ChunkValues gate = ChunkValues::of(gate_row[chunk_idx]);
            ChunkValues up = ChunkValues::of(up_row[chunk_idx]);
            if constexpr (Config::has_biases) {
                gate.add(args.gate_bias + bias + chunk_idx * 8);  //~ gate_bias_added
                up.add(args.up_bias + bias + chunk_idx * 8);      //~ up_bias_added
            }
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) {
                gate.values[i] = Config::Activation::apply(gate.values[i], up.values[i]);
            }
            chunk = gate.chunk();
        }
        if constexpr (Config::rounds_to_mxfp8) chunk = mxfp8_rounded(chunk);  //~ activated_rounded
        if constexpr (Config::quantizes) {
            store_quantized(activated, args.num_chunks, chunk_idx, chunk);
        } else if (is_valid) {
            reinterpret_cast<uint4*>(activated)[chunk_idx] = chunk;
        }
    }
}

}  // namespace deep_moe
