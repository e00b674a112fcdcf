// Dispatch, receiving: what is stored about a row besides its values.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/split/low_latency_buffer.cuh"

namespace deep_moe {

// Rows of a local expert in the tensors of all of them.
template <class Config>
inline constexpr uint32_t rows_per_expert = Config::num_ranks * Config::num_max_tokens_per_rank;

// One thread: whose row it is, for the caller, for combine, and, where rows stay, for their token's
// rank. number: what the caller is told, token_idx or the token's origin.
template <class Config>
__device__ void tell_source(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                            uint32_t half, uint32_t row, uint32_t rank_idx, uint32_t token_idx,
                            uint32_t slot_idx, uint32_t number) {
    const uint32_t token_topk_idx = token_idx * Config::num_topk + slot_idx;
    args.src_slots[row] = static_cast<int32_t>(token_topk_idx);  //~ source_told
    args.src_info[row] = static_cast<int32_t>(number);           //~ token_told
    if constexpr (Config::has_shared_rows) {
        // Read behind this rank's arrival in combine.
        *ranks.of(rank_idx).row_of_slot(half, token_topk_idx) = row;  //~ row_told
    }
}

// Where a word of a row's scales goes.
template <class Config>
__device__ uint32_t* scale_word_of_row(const LowLatencyArgs& args, uint32_t row, uint32_t column) {
    return args.recv_scales + row / rows_per_expert<Config> * args.scale_expert_stride +
           row % rows_per_expert<Config> * args.scale_row_stride +
           column * args.scale_column_stride;
}

}  // namespace deep_moe
