// Combine, sending: each row that a local expert made goes to the rank that the token came from,
// into the place of its slot.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/copy_row.cuh"
#include "deep_moe/split/expert_rows.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/received_row.cuh"
#include "deep_moe/split/sent_messages.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// A whole warp: the rank that sent a row of an expert.
template <class Config>
__device__ uint32_t source_rank(const int64_t* ranges, uint32_t row) {
    uint32_t num_ended = 0;  // ranks whose rows end in front of it
    for (uint32_t base = 0; base < Config::num_ranks; base += warp_size) {
        const uint32_t rank_idx = base + ptx::lane_idx();
        const uint64_t range =
            rank_idx < Config::num_ranks ? static_cast<uint64_t>(ranges[rank_idx]) : ~uint64_t{0};
        const uint32_t begin = range >> 32;
        const uint32_t end = begin + static_cast<uint32_t>(range);
        num_ended += __popc(__ballot_sync(full_warp, rank_idx < Config::num_ranks && end <= row));
    }
    return num_ended;
}

// All warps of the grid.
template <class Config>
__device__ void send_rows(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                          const ActiveRanks<Config>& active, uint32_t shared_memory, uint32_t half,
                          const FirstCounts<Config>& counts, const SentMessages<Config>& sent) {
    constexpr uint32_t num_warps = Config::num_threads / warp_size;
    const ExpertRows<Config> rows(shared_memory);
    rows.sum_up(args.recv_count, counts);
    // Warps take parts of rows, so that few rows keep many warps busy.
    constexpr uint32_t parts = RowPart<Config>::per_row;
    const uint32_t num_items = rows.num_rows() * parts;
    for (uint32_t i = ptx::warp_idx() * Config::num_ctas + blockIdx.x; i < num_items;
         i += num_warps * Config::num_ctas) {
        const uint32_t local_expert_idx = rows.expert_of(i / parts);
        const uint32_t row = i / parts - rows.first(local_expert_idx);
        const uint64_t row_idx = uint64_t{local_expert_idx} * rows_per_expert<Config> + row;
        // On its way while its source is looked up.
        const RowPart<Config> part(static_cast<const uint16_t*>(args.y) + row_idx * Config::hidden,
                                   i % parts);
        const auto source = static_cast<uint32_t>(args.src_slots[row_idx]);  // with its rank
        const uint32_t rank_idx =
            source_rank<Config>(args.layout_range + local_expert_idx * Config::num_ranks, row);
        if (!active.contains(rank_idx)) continue;
        part.store(ranks.of(rank_idx).combine(half, source % Config::num_topk,
                                              source / Config::num_topk));  //~ row_sent
        if (ptx::lane_idx() == 0) sent.add_beside_others(rank_idx);
    }
}

}  // namespace deep_moe
