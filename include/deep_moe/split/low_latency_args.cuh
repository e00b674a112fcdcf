// The arguments of the low-latency kernels.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe {

struct SplitTraceCta;  // split/phase_span.cuh

// Of dispatch and of combine; what the other one uses is null. T: tokens of this rank, in this
// call. N: rows of a local expert, num_ranks * num_max_tokens_per_rank. Chunks of 16 bytes make a
// row of recv_x.
struct LowLatencyArgs {
    uint64_t rank_buffers[max_num_ranks];  // each rank's symmetric buffer, as this rank sees it
    WaitStatus* status;
    uint64_t wait_timeout_ns;  // limit of a wait for other ranks, in nanoseconds of %globaltimer
    uint32_t rank_idx;
    uint32_t num_tokens;
    const void* topk_idx;  // i64 or i32 [T, topk]

    // What a dispatch gives to its combine.
    uint32_t* call_idx;     // [1]
    int32_t* recv_count;    // [E_local]
    int32_t* src_slots;     // [E_local, N]: token_idx * topk + slot on the source rank
    int64_t* layout_range;  // [E_local, ranks]: count in the low half, first row in the high one
    uint32_t* sent_rows;    // [ranks]: rows that each rank's experts have of this rank's tokens

    // Statistics, added to; null where nobody asks for them.
    int64_t* wait_cycles;    // [ranks]: clocks that one CTA waited for each rank
    int32_t* expert_totals;  // [E_local]: rows of each local expert, over all dispatches

    // Dispatch.
    const void* x;           // bf16 [T, hidden]; with Config::relays_tokens as it travels
    const uint32_t* x_sf;    // [T, hidden/128] with Config::relays_tokens
    const int32_t* origins;  // [T] with Config::relays_tokens: what src_info tells of each
    void* recv_x;            // [E_local, N, hidden] of the format
    uint32_t* recv_scales;   // [E_local, N, hidden/128] by the strides below, in words
    uint64_t scale_expert_stride;
    uint64_t scale_row_stride;
    uint64_t scale_column_stride;
    int32_t* src_info;  // [E_local, N]: token_idx on the source rank, or its origin

    // Combine.
    const void* y;                  // bf16 [E_local, N, hidden]
    const float* topk_weights;      // [T, topk]
    void* out;                      // bf16 [T, hidden]
    SplitTraceCta* trace;           // [CTAs], zero before the call; null without Config::trace
    uint32_t num_earlier_combines;  // of this call, where the combine repeats one
};

}  // namespace deep_moe
