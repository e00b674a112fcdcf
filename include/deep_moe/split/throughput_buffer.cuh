// Typed views of the symmetric buffers of the throughput all-to-all. Offsets, dimensions and
// element types come from `Config::Symm`, where Python renders the one declaration of the layout;
// an accessor has the name of its segment. Shapes stand at the end of each line.
//
// A rank writes its data into its own buffer, and the others fetch it. split/step.cuh says when it
// may be written again.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/rank_views.cuh"
#include "deep_moe/split/throughput_args.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

template <class Config>
class ThroughputBuffer {
    using Symm = typename Config::Symm;

 public:
    __device__ explicit ThroughputBuffer(uint64_t base) : base_(base) {}

    // What each word of `arrivals` has after the rounds that this rank has been through.
    __device__ uint32_t* units_told() const {
        return at<typename Symm::units_told_element>(Symm::units_told_offset);
    }
    // Dispatches in which ranks have told each other counts, modulo 2^32.
    __device__ uint32_t* num_counts() const {
        return at<typename Symm::num_counts_element>(Symm::num_counts_offset);
    }
    // What the step before took over the links: a StepKind.
    __device__ uint32_t* last_step() const {
        return at<typename Symm::last_step_element>(Symm::last_step_offset);
    }
    // Not zero once a kernel of this rank has given up: later ones, perhaps launched already, do
    // nothing and tell nobody anything, until the host resets the buffer.
    __device__ uint32_t* gave_up() const {
        return at<typename Symm::gave_up_element>(Symm::gave_up_offset);
    }
    // CTAs of this rank that have ended a step (sync/grid_gather.cuh).
    __device__ uint32_t* gather_counter() const {
        return at<typename Symm::gather_counter_element>(Symm::gather_counter_offset);
    }
    // What a sharing warp of a rank's CTA has told the CTA of this number, over all rounds
    // (parts.cuh).
    __device__ int32_t* arrivals(uint32_t cta_idx, uint32_t rank_idx, uint32_t warp) const {
        return at<typename Symm::arrivals_element>(Symm::arrivals_offset) +
               (cta_idx * Symm::arrivals_dim1 + rank_idx) * Symm::arrivals_dim2 +
               warp;  // [CTAs][ranks][sharing warps]
    }

    // Dispatches of a rank whose counts have come.
    __device__ int32_t* count_arrivals(uint32_t rank_idx) const {
        return at<typename Symm::count_arrivals_element>(Symm::count_arrivals_offset) +
               rank_idx;  // [ranks]
    }
    // Not zero for a rank that a step since the last reset has left out.
    __device__ uint32_t* left_out(uint32_t rank_idx) const {
        return at<typename Symm::left_out_element>(Symm::left_out_offset) + rank_idx;  // [ranks]
    }

    // What each source rank tells all ranks: its tokens, and its slots that name each expert.
    __device__ uint32_t* num_tokens(uint32_t rank_idx) const {
        return at<typename Symm::num_tokens_element>(Symm::num_tokens_offset) +
               rank_idx;  // [ranks]
    }
    __device__ uint32_t* expert_totals(uint32_t rank_idx, uint32_t expert_idx) const {
        return at<typename Symm::expert_totals_element>(Symm::expert_totals_offset) +
               rank_idx * Symm::expert_totals_dim1 + expert_idx;  // [ranks][experts]
    }

    // This rank's tokens, with what their slots name: PlaceAtExpert, or RankRow where the rows are
    // known.
    __device__ uint32_t* slot_words(uint32_t token_topk_idx) const {
        return at<typename Symm::slot_words_element>(Symm::slot_words_offset) +
               token_topk_idx;  // [T * topk]
    }
    __device__ float* slot_weights(uint32_t token_topk_idx) const {
        return at<typename Symm::slot_weights_element>(Symm::slot_weights_offset) +
               token_topk_idx;  // [T * topk]
    }
    // Rows of BF16 have room; those of a format with fewer bytes lie closer together.
    __device__ uint8_t* tokens(uint64_t offset) const {
        return at<typename Symm::tokens_element>(Symm::tokens_offset) + offset;  // [T * H * 2]
    }
    __device__ uint32_t* token_scales(uint32_t token_idx) const {
        return at<typename Symm::token_scales_element>(Symm::token_scales_offset) +
               uint64_t{token_idx} * Symm::token_scales_dim1;  // [T][H/128]
    }

    // What this rank's experts made; or, where ranks send rows, those of this rank's slots. And a
    // number for each of the experts' rows.
    __device__ uint16_t* rows(uint32_t row_idx) const {
        return at<typename Symm::rows_element>(Symm::rows_offset) +
               uint64_t{row_idx} * Symm::rows_dim1;  // [max(N, T * topk)][H] bf16
    }
    __device__ float* scalars(uint32_t row_idx) const {
        return at<typename Symm::scalars_element>(Symm::scalars_offset) + row_idx;  // [N]
    }

 private:
    template <class T>
    __device__ T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(base_ + offset);
    }

    uint64_t base_;
};

// The buffers of all ranks, and which of the ranks take part in the step.
template <class Config>
class ThroughputRanks : public RankViews<Config, ThroughputBuffer<Config>, ThroughputArgs> {
 public:
    // A whole converged warp.
    __device__ explicit ThroughputRanks(const ThroughputArgs& args)
        : RankViews<Config, ThroughputBuffer<Config>, ThroughputArgs>(args),
          active_(args.masked_ranks) {}

    __device__ const CallRanks<Config>& active() const { return active_; }

 private:
    CallRanks<Config> active_;
};

// A slot's expert and its place among the slots of its rank that name this expert, in the order of
// tokens and slots.
struct PlaceAtExpert {
    static constexpr uint32_t none = 0xffffffff;
    static constexpr uint32_t place_bits = 20;
    static __device__ uint32_t pack(uint32_t expert_idx, uint32_t place) {
        return expert_idx << place_bits | place;
    }
    static __device__ uint32_t expert_idx(uint32_t word) { return word >> place_bits; }
    static __device__ uint32_t place(uint32_t word) { return word & ((1u << place_bits) - 1); }
};

// The rank of a slot's expert and the slot's row there.
struct RankRow {
    static constexpr uint32_t none = 0xffffffff;
    static constexpr uint32_t row_bits = 24;
    static __device__ uint32_t pack(uint32_t rank_idx, uint32_t row_idx) {
        return rank_idx << row_bits | row_idx;
    }
    static __device__ uint32_t rank_idx(uint32_t word) { return word >> row_bits; }
    static __device__ uint32_t row_idx(uint32_t word) { return word & ((1u << row_bits) - 1); }
};

}  // namespace deep_moe
