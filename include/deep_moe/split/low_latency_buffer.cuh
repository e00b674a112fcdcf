// Typed views of the symmetric buffers of the low-latency all-to-all. Offsets, dimensions and
// element types come from `Config::Symm`, where Python renders the one declaration of the layout;
// an accessor has the name of its segment. Shapes stand at the end of each line.
//
// Everything from `recv_counts` up to `combine` exists twice: calls use the halves in turn.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_views.cuh"
#include "deep_moe/split/low_latency_args.cuh"

namespace deep_moe {

template <class Config>
class LowLatencyBuffer {
    using Symm = typename Config::Symm;

 public:
    __device__ explicit LowLatencyBuffer(uint64_t base) : base_(base) {}

    // Dispatches that this rank has sent, modulo 2^32; the last one that ends its sending counts.
    __device__ uint32_t* num_calls() const {
        return at<typename Symm::num_calls_element>(Symm::num_calls_offset);
    }
    // Not zero once a kernel of this rank has given up: later ones, perhaps launched already, do
    // nothing and tell nobody anything, until the host resets the buffer.
    __device__ uint32_t* gave_up() const {
        return at<typename Symm::gave_up_element>(Symm::gave_up_offset);
    }
    // CTAs of this rank that have ended their sending (sync/grid_gather.cuh).
    __device__ uint32_t* gather_counter() const {
        return at<typename Symm::gather_counter_element>(Symm::gather_counter_offset);
    }
    // Not zero for masked ranks; written by the host.
    __device__ uint32_t* masked_ranks(uint32_t rank_idx) const {
        return at<typename Symm::masked_ranks_element>(Symm::masked_ranks_offset) +
               rank_idx;  // [ranks]
    }

    // How many tokens a source rank has for each local expert, and behind them, where a token comes
    // once for all of its experts, how many it sends at all; encoded (EncodedCount), so that zero
    // means "not yet".
    static constexpr uint32_t num_count_words = Symm::recv_counts_dim2;  // E_local, or + 1
    __device__ uint32_t* recv_counts(uint32_t half, uint32_t rank_idx, uint32_t word_idx) const {
        return at<typename Symm::recv_counts_element>(Symm::recv_counts_offset) +
               (half * Symm::recv_counts_dim1 + rank_idx) * num_count_words +
               word_idx;  // [2][ranks][num_count_words]
    }
    // Tokens of a source rank that are here, and one more when it has come to the call. With
    // Config::stages_by_expert only that one.
    __device__ int32_t* dispatch_arrivals(uint32_t half, uint32_t rank_idx) const {
        return at<typename Symm::dispatch_arrivals_element>(Symm::dispatch_arrivals_offset) +
               half * Symm::dispatch_arrivals_dim1 + rank_idx;  // [2][ranks]
    }
    // With Config::stages_by_expert: messages of a source rank for a local expert that are here.
    __device__ int32_t* message_arrivals(uint32_t half, uint32_t local_expert_idx,
                                         uint32_t rank_idx) const {
        const uint32_t expert = half * Symm::message_arrivals_dim1 + local_expert_idx;
        return at<typename Symm::message_arrivals_element>(Symm::message_arrivals_offset) +
               expert * Symm::message_arrivals_dim2 + rank_idx;  // [2][E_local][ranks]
    }
    // Parts of an experts' rank's rows that are here; split/row_arrivals.cuh.
    __device__ int32_t* combine_arrivals(uint32_t half, uint32_t rank_idx) const {
        return at<typename Symm::combine_arrivals_element>(Symm::combine_arrivals_offset) +
               half * Symm::combine_arrivals_dim1 + rank_idx;  // [2][ranks]
    }

    // Staging: tokens of a source rank, in its order, each once. First the token's index there,
    // with Config::relays_tokens its origin, then for each of its slots the RowOfExpert.
    static constexpr uint32_t num_header_words = Config::relays_tokens ? 2 : 1;  // before these
    __device__ uint32_t* staged_headers(uint32_t half, uint32_t rank_idx, uint32_t slot_idx) const {
        const uint32_t row =
            (half * Symm::staged_headers_dim1 + rank_idx) * Symm::staged_headers_dim2 + slot_idx;
        return at<typename Symm::staged_headers_element>(Symm::staged_headers_offset) +
               uint64_t{row} * Symm::staged_headers_dim3;  // [2][ranks][T][.. + topk]
    }
    __device__ uint8_t* staged_values(uint32_t half, uint32_t rank_idx, uint32_t slot_idx) const {
        const uint32_t row =
            (half * Symm::staged_values_dim1 + rank_idx) * Symm::staged_values_dim2 + slot_idx;
        return at<typename Symm::staged_values_element>(Symm::staged_values_offset) +
               uint64_t{row} * Symm::staged_values_dim3;  // [2][ranks][T][row bytes]
    }
    __device__ uint32_t* staged_scales(uint32_t half, uint32_t rank_idx, uint32_t slot_idx) const {
        const uint32_t row =
            (half * Symm::staged_scales_dim1 + rank_idx) * Symm::staged_scales_dim2 + slot_idx;
        return at<typename Symm::staged_scales_element>(Symm::staged_scales_offset) +
               uint64_t{row} * Symm::staged_scales_dim3;  // [2][ranks][T][H/128]
    }

    // With Config::stages_by_expert, in place of these: for each local expert the messages of each
    // source rank, a message for each of its tokens (split/message.cuh).
    __device__ uint8_t* message(uint32_t half, uint32_t local_expert_idx, uint32_t rank_idx,
                                uint32_t slot_idx) const {
        const uint32_t expert = half * Symm::messages_dim1 + local_expert_idx;
        const uint32_t row =
            (expert * Symm::messages_dim2 + rank_idx) * Symm::messages_dim3 + slot_idx;
        return at<typename Symm::messages_element>(Symm::messages_offset) +
               uint64_t{row} * Symm::messages_dim4;  // [2][E_local][ranks][T][message bytes]
    }

    // The experts' results for this rank's tokens, one row per slot.
    __device__ uint16_t* combine(uint32_t half, uint32_t topk_idx, uint32_t token_idx) const {
        const uint32_t row =
            (half * Symm::combine_dim1 + topk_idx) * Symm::combine_dim2 + token_idx;
        return at<typename Symm::combine_element>(Symm::combine_offset) +
               uint64_t{row} * Symm::combine_dim3;  // [2][topk][T][H] bf16
    }

    // With Config::has_shared_rows: the rows of the local experts, where the caller's experts write
    // them and the tokens' ranks fetch them.
    __device__ const uint16_t* shared_rows(uint32_t row_idx) const {
        return at<typename Symm::shared_rows_element>(Symm::shared_rows_offset) +
               uint64_t{row_idx} * Symm::shared_rows_dim1;  // [E_local * N][H] bf16
    }
    // And where there the row of a slot of this rank's tokens is: of the slot's owner's rows. Only
    // for the first slot that names an expert. Its owner writes it when it receives the token.
    __device__ uint32_t* row_of_slot(uint32_t half, uint32_t token_topk_idx) const {
        return at<typename Symm::row_of_slot_element>(Symm::row_of_slot_offset) +
               half * Symm::row_of_slot_dim1 + token_topk_idx;  // [2][T * topk]
    }

 private:
    template <class T>
    __device__ T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(base_ + offset);
    }

    uint64_t base_;
};

template <class Config>
using LowLatencyRanks = RankViews<Config, LowLatencyBuffer<Config>, LowLatencyArgs>;

// A count as it travels: never zero.
struct EncodedCount {
    static __device__ uint32_t encode(uint32_t count) { return ~count; }  //~ count_encoded
    static __device__ uint32_t decode(uint32_t word) { return ~word; }
};

// In a staged header: the local expert that a slot names and the token's place among those that its
// source has for that expert; `none` for a slot that is not for this rank, and for one that names
// an expert again.
struct RowOfExpert {
    static constexpr uint32_t none = 0xffffffff;
    static __device__ uint32_t pack(uint32_t local_expert_idx, uint32_t row) {
        return local_expert_idx << 16 | row;
    }
    static __device__ uint32_t local_expert_idx(uint32_t packed) { return packed >> 16; }
    static __device__ uint32_t row(uint32_t packed) { return packed & 0xffff; }
};

}  // namespace deep_moe
