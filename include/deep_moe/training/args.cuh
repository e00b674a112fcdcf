// By-value arguments of the training kernels; read by jit/cpp_structs.py. All tensors are
// contiguous unless a stride is given.
//
// Three layouts:
//   tokens  [num_tokens][...], as the caller has them
//   slots   [num_tokens * num_topk], slot = token * num_topk + k
//   rows    [num_rows][...], what experts read and write: those of one expert side by side, in the
//           order of their slots, each expert's behind a multiple of the alignment. `offs` is where
//           each one ends. Padding rows have no slot (-1). Nothing behind the last end is read.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

// Of count_slots, scan_counts and place_slots, which run in this order.
struct RouteSlotsArgs {
    const void* topk_idx;     // i64 or i32 [num_slots]
    int32_t* segment_counts;  // [num_segments][num_experts]; then the sums of earlier segments
    int32_t* offs;            // [num_experts]
    int32_t* row_of_slot;     // [num_slots], -1 if the slot names no expert
    int32_t* slot_of_row;     // [num_rows]
    uint32_t num_slots;
    uint32_t num_rows;
    uint32_t num_segments;
};

// What kernels know of the rows that they go through.
struct RowsArgs {
    const int32_t* offs;         // [num_experts]
    const int32_t* slot_of_row;  // [num_rows]
    uint32_t num_experts;
    uint32_t num_rows;
};

struct GatherRowsArgs {
    RowsArgs rows;
    const int32_t* row_of_slot;  // [num_tokens * num_topk]
    const void* tokens;          // bf16 [num_tokens][num_chunks * 8]
    void* gathered;              // bf16 [num_rows][num_chunks * 8]
    uint32_t num_tokens;
    uint32_t num_topk;
    uint32_t num_chunks;
};

struct ActivateRowsArgs {
    RowsArgs rows;
    const void* gate;        // bf16 [num_rows][...]
    const void* up;          // bf16 [num_rows][...]
    const float* gate_bias;  // [num_experts][num_chunks * 8], or null
    const float* up_bias;    // [num_experts][num_chunks * 8], or null
    void* activated;         // bf16 [num_rows][num_chunks * 8], or quantized rows
    uint32_t num_chunks;     // of 8 values of the intermediate size
    uint32_t stride_chunks;  // from a row of gate, and of up, to the next
};

struct ActivateRowsBackwardArgs {
    RowsArgs rows;
    const void* gate;           // bf16 [num_rows][...]
    const void* up;             // bf16 [num_rows][...]
    const float* gate_bias;     // [num_experts][num_chunks * 8], or null
    const float* up_bias;       // [num_experts][num_chunks * 8], or null
    const void* d_activated;    // bf16 [num_rows][num_chunks * 8], without the routing weight
    const float* topk_weights;  // [num_slots]
    const void* d_rows;         // bf16 [num_rows][num_hidden_chunks * 8], or null without biases
    const float* down_bias;     // [num_experts][num_hidden_chunks * 8], or null
    void* activated;            // bf16 [num_rows][num_chunks * 8], times the routing weight
    void* d_gate;               // bf16 [num_rows][...]
    void* d_up;                 // bf16 [num_rows][...]
    float* d_topk_weights;      // [num_slots], zero
    uint32_t num_chunks;
    uint32_t num_hidden_chunks;
    uint32_t stride_chunks;    // of gate, up
    uint32_t d_stride_chunks;  // of d_gate, d_up
};

struct ScatterRowsArgs {
    const int32_t* offs;         // [num_experts]
    const int32_t* row_of_slot;  // [num_tokens * num_topk]
    const void* first;           // bf16 [num_rows][num_chunks * 8]
    const void* second;          // the same, added to the first; or null
    const float* topk_weights;   // [num_tokens * num_topk], or null for 1
    const float* bias;           // [num_experts][num_chunks * 8], or null
    void* tokens;                // bf16 [num_tokens][num_chunks * 8]
    uint32_t num_experts;
    uint32_t num_tokens;
    uint32_t num_topk;
    uint32_t num_chunks;
};

// Of quantize_rows and dequantize_rows.
struct QuantizeRowsArgs {
    void* values;     // bf16 [num_rows][num_chunks * 8]
    void* quantized;  // as training/quantized_rows.cuh has them
    uint32_t num_rows;
    uint32_t num_chunks;  // a multiple of 16
};

// Of quantize_columns. Blocks are those of training/token_blocks.cuh; num_columns is a multiple of
// 128.
struct QuantizeColumnsArgs {
    RowsArgs rows;
    const void* values;  // bf16 [num_rows][num_columns], or of tokens with Config::gathers
    void* columns;       // E4M3 [num_blocks][num_columns][128]
    float* scales;       // [num_blocks][num_columns / 128]
    void* quantized;     // rows as training/quantized_rows.cuh has them, or null
    uint32_t num_topk;
    uint32_t num_columns;
};

// Only with Config::has_same and with Config::has_transposed, respectively, the results are there;
// only with Config::compares the differences.
struct QuantizeWeightsArgs {
    const void* weights;       // bf16 [experts][num_rows][num_columns]
    void* same;                // E4M3 [experts][num_rows][num_columns]
    float* same_scales;        // [experts][ceil(num_rows / 128)][ceil(num_columns / 128)]
    void* transposed;          // E4M3 [experts][num_columns][num_rows]
    float* transposed_scales;  // [experts][ceil(num_columns / 128)][ceil(num_rows / 128)]
    int32_t* num_differences;  // threads that saw one are added to it
    uint32_t num_rows;         // with transposed a multiple of 128
    uint32_t num_columns;      // a multiple of 8
};

struct RoundWeightsArgs {
    const void* weights;  // bf16 [num_groups * 32][num_pairs * 2]
    void* rounded;        // bf16, the same
    uint32_t num_groups;
    uint32_t num_pairs;
};

}  // namespace deep_moe
