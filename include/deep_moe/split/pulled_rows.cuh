// Where the receiver of a dispatch puts the slots of a fetched token: computed from the counts of
// all ranks, or known from an earlier dispatch.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/split/expert_places.cuh"
#include "deep_moe/split/throughput_buffer.cuh"

namespace deep_moe {

// Instead of a row: the slot is not for this rank.
inline constexpr uint32_t not_here = 0xffffffff;

// Slot words are PlaceAtExpert.
template <class Config>
class CountedRows {
 public:
    static constexpr bool are_known = false;

    __device__ CountedRows(const ExpertPlaces<Config>& places, const ThroughputRanks<Config>& ranks)
        : places_(places), ranks_(ranks) {}

    __device__ uint32_t row_of(uint32_t word, uint32_t source) const {
        const uint32_t expert_idx = PlaceAtExpert::expert_idx(word);
        const uint32_t rank_idx = expert_idx / Config::num_experts_per_rank;
        if (word == PlaceAtExpert::none || rank_idx != ranks_.rank_idx()) return not_here;
        return places_.first_row(expert_idx, source) + PlaceAtExpert::place(word);  //~ row_pulled
    }

    __device__ uint32_t num_tokens(uint32_t source) const {
        return tokens_told(ranks_.local(), ranks_.active(), source);
    }

    // Behind a local expert's last row.
    __device__ uint32_t end_of(uint32_t local_expert_idx) const {
        return places_.end_of(ranks_.rank_idx() * Config::num_experts_per_rank + local_expert_idx);
    }

 private:
    const ExpertPlaces<Config>& places_;
    const ThroughputRanks<Config>& ranks_;
};

// Slot words are RankRow.
template <class Config>
class KnownRows {
 public:
    static constexpr bool are_known = true;

    __device__ explicit KnownRows(const ThroughputArgs& args) : args_(args) {}

    __device__ uint32_t row_of(uint32_t word, uint32_t) const {
        if (word == RankRow::none || RankRow::rank_idx(word) != args_.rank_idx) return not_here;
        return RankRow::row_idx(word);  //~ row_pulled_again
    }

    __device__ uint32_t num_tokens(uint32_t source) const {
        return static_cast<uint32_t>(args_.rank_tokens[source]);
    }

    // Behind a local expert's last row.
    __device__ uint32_t end_of(uint32_t local_expert_idx) const {
        return static_cast<uint32_t>(args_.expert_begin[local_expert_idx] +
                                     args_.expert_count[local_expert_idx]);
    }

 private:
    const ThroughputArgs& args_;
};

}  // namespace deep_moe
