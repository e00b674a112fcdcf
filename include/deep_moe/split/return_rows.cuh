// Combine of the throughput path: the experts' rows, or a number for each of them, stay with their
// rank, in its buffer, and the tokens' ranks fetch them from there.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/copy_row.cuh"
#include "deep_moe/split/expert_rows.cuh"
#include "deep_moe/split/reduce_slots.cuh"
#include "deep_moe/split/throughput_buffer.cuh"

namespace deep_moe {

// All warps of the grid: the experts' rows for other ranks into the own buffer. This rank's own are
// added from where they are; padding stays behind.
template <class Config>
__device__ void share_rows(const ThroughputArgs& args, const ThroughputBuffer<Config>& local,
                           uint32_t shared_memory) {
    constexpr uint32_t num_warps = Config::num_threads / warp_size;
    const ExpertRows<Config> rows(shared_memory);
    rows.sum_up(args.expert_count);
    const uint32_t num_rows = rows.num_rows();
    for (uint32_t i = ptx::warp_idx() * Config::num_ctas + blockIdx.x; i < num_rows;
         i += num_warps * Config::num_ctas) {
        const uint32_t local_expert_idx = rows.expert_of(i);
        const uint32_t row = static_cast<uint32_t>(args.expert_begin[local_expert_idx]) + i -
                             rows.first(local_expert_idx);  //~ row_shared
        const int32_t* const own_rows = args.own_rows + 2 * local_expert_idx;
        const bool is_own =
            row >= static_cast<uint32_t>(own_rows[0]) && row < static_cast<uint32_t>(own_rows[1]);
        if (is_own) continue;  //~ own_row_stays
        copy_row<Config>(local.rows(row),
                         static_cast<const uint16_t*>(args.y) + uint64_t{row} * Config::hidden);
    }
}

// All threads of the grid. Padding goes along.
template <class Config>
__device__ void share_scalars(const ThroughputArgs& args, const ThroughputBuffer<Config>& local) {
    const auto end = static_cast<uint32_t>(args.expert_end[Config::num_experts_per_rank - 1]);
    for (uint32_t i = blockIdx.x * Config::num_threads + threadIdx.x; i < end;
         i += Config::num_ctas * Config::num_threads) {
        *local.scalars(i) = args.scalars[i];
    }
}

// What `SlotReduction` asks. A whole warp.
template <class Config>
__device__ SlotRow returned_row(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                                uint32_t token_idx) {
    if (ptx::lane_idx() >= Config::num_topk) return {0, 0.0f};
    const uint32_t slot_idx = token_idx * Config::num_topk + ptx::lane_idx();
    const auto word = static_cast<uint32_t>(args.slot_rows[slot_idx]);
    if (word == RankRow::none) return {0, 0.0f};
    const uint32_t rank_idx = RankRow::rank_idx(word);
    const uint16_t* row = ranks.of(rank_idx).rows(RankRow::row_idx(word));  //~ row_returned
    if (Config::copies_rows && rank_idx == ranks.rank_idx()) {
        row = static_cast<const uint16_t*>(args.y) +
              uint64_t{RankRow::row_idx(word)} * Config::hidden;  //~ own_row_added
    }
    float weight = 1.0f;
    if constexpr (Config::has_weights) weight = args.topk_weights[slot_idx];
    return {reinterpret_cast<uint64_t>(row), weight};
}

// All threads of the grid, when all ranks' numbers may be fetched.
template <class Config>
__device__ void fetch_scalars(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks) {
    for (uint32_t i = blockIdx.x * Config::num_threads + threadIdx.x;
         i < args.num_tokens * Config::num_topk; i += Config::num_ctas * Config::num_threads) {
        const auto word = static_cast<uint32_t>(args.slot_rows[i]);
        float scalar = 0.0f;
        if (word != RankRow::none) {
            scalar = *ranks.of(RankRow::rank_idx(word)).scalars(RankRow::row_idx(word));
        }
        args.slot_scalars[i] = scalar;  //~ scalar_returned
    }
}

}  // namespace deep_moe
