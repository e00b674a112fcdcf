// By-value arguments of the products' kernels; read by jit/cpp_structs.py.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe {

// Of grouped_product: y[row] = x[row] times the matrix of the row's expert, transposed.
//
// Rows of expert e are expert_begin[e] and following, expert_count[e] of them, or without
// expert_begin rows e * rows_per_expert and following. With expert_end they are those from
// expert_end[e - 1] on, or 0, and before expert_end[e]. What of them lies outside of the num_rows
// rows is left out.
//
// With Config::sums_rows each expert has a product of its own: y[expert] = sums over the expert's
// rows of x[row][i] * weight[row][j]. K are the rows then, in the blocks of
// training/token_blocks.cuh with expert_end, and both operands are as quantize_columns makes them:
//   x       E4M3 [num_blocks][num_rows][128], x_sf [num_blocks][num_rows / 128]
//   weight  E4M3 [num_blocks][N][128], weight_sf [num_blocks][N / 128]
//   y       bf16 [num_experts][num_rows][N], or with Config::y_bytes 4 float32
// num_rows and N are multiples of 128. Strides, counts and num_k_blocks are unused.
//
// With Config::adds the products are added to what y holds. In BF16 they are rounded before.
struct alignas(64) GroupedProductArgs {
    TensorMap x;                  // E4M3 [1][num_rows][K]
    TensorMap weight;             // E4M3 [num_experts][N][K]
    const float* x_sf;            // of each row and 128 values along K; strides below
    const float* weight_sf;       // [num_experts][ceil(N / 128)][K / 128]
    const int32_t* expert_begin;  // [num_experts], or null
    const int32_t* expert_count;  // [num_experts], or null with expert_end
    const int32_t* expert_end;    // [num_experts], or null
    void* y;                      // bf16 [num_rows][N]
    // Strides of x_sf in numbers. Of expert e, row r of y has x_sf[e * x_sf_expert_stride + r *
    // x_sf_row_stride] and following; the first is 0 where all rows are evenly spaced.
    int64_t x_sf_expert_stride;
    int64_t x_sf_row_stride;
    int64_t x_sf_k_stride;
    uint32_t num_experts;
    uint32_t num_rows;
    uint32_t rows_per_expert;
    uint32_t num_columns;   // N, a multiple of 8
    uint32_t num_k_blocks;  // K / 128
};

}  // namespace deep_moe
