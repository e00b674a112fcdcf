// The arguments of the throughput kernels.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe {

struct SplitTraceCta;  // split/phase_span.cuh

// Of dispatch and of combine; what the other one uses is null. T: tokens of this rank, in this
// dispatch. N: Config::max_recv_rows.
struct ThroughputArgs {
    uint64_t rank_buffers[max_num_ranks];  // each rank's symmetric buffer, as this rank sees it
    WaitStatus* status;
    uint64_t wait_timeout_ns;  // limit of a wait for other ranks, in nanoseconds of %globaltimer
    uint32_t rank_idx;
    uint32_t num_tokens;

    // What a dispatch finds out and later steps go by.
    int32_t* slot_rows;     // [T, topk]: RankRow, -1 for slots that are not used
    int32_t* expert_begin;  // [E_local]: first row
    int32_t* expert_count;  // [E_local]: rows
    int32_t* expert_end;    // [E_local]: the next expert's first row, or the end of all
    int32_t* rank_tokens;   // [ranks]: tokens of each
    int32_t* rows_here;     // [ranks * max tokens, topk]: of all ranks' slots the row here, or -1

    // A dispatch's to send or to multiply with, a combine's to add by; null without.
    const float* topk_weights;  // [T, topk]

    // Dispatch.
    const void* topk_idx;   // i64 or i32 [T, topk]
    const void* x;          // bf16 [T, hidden], or e4m3 with Config::is_quantized_input
    const uint32_t* x_sf;   // [T, hidden/128] with Config::is_quantized_input
    void* recv_x;           // [N, hidden] of the format
    uint32_t* recv_scales;  // [N, words]
    float* recv_weights;    // [N]
    int64_t* row_ids;       // [N]: of a row's slot among those of all ranks; null if nobody asks

    // Combine.
    const void* y;         // bf16 [N, hidden]; null if it lies in the symmetric buffer
    void* out;             // bf16 [T, hidden]
    const float* scalars;  // [N]
    float* slot_scalars;   // [T, topk]

    SplitTraceCta* trace;  // [CTAs], zero before the call; null without Config::trace
    // With Config::masks_ranks only, see sync/active_ranks.cuh. Else null.
    const uint32_t* masked_ranks;  // [ranks], not zero for masked ranks
};

}  // namespace deep_moe
