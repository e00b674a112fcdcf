// Low-latency combine, receiving: where the rows of a token's slots are.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/reduce_slots.cuh"
#include "deep_moe/split/routed_slot.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// Where the row of a used slot is: in the own buffer, or, where it stays with its expert, there.
template <class Config>
__device__ uint64_t row_address(const LowLatencyRanks<Config>& ranks,
                                const LowLatencyBuffer<Config>& local, uint32_t half,
                                uint32_t token_idx, const RoutedSlot& slot) {
    const uint32_t row_slot = slot.first_slot_of_expert;  //~ row_of_slot
    if constexpr (Config::fetches_rows) {
        const uint32_t row_idx = *local.row_of_slot(half, token_idx * Config::num_topk + row_slot);
        const uint32_t rank_idx = slot.rank_idx;
        const uint16_t* const row = ranks.of(rank_idx).shared_rows(row_idx);  //~ row_fetched
        return reinterpret_cast<uint64_t>(row);
    } else {
        return reinterpret_cast<uint64_t>(local.combine(half, row_slot, token_idx));
    }
}

// What `SlotReduction` asks. A whole warp.
template <class Config>
__device__ SlotRow sent_row(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                            const ActiveRanks<Config>& active, uint32_t half, uint32_t token_idx) {
    const RoutedSlot slot = route_slot<Config, warp_size>(args.topk_idx, active, token_idx, true);
    if (!slot.is_used()) return {0, 0.0f};
    return {row_address(ranks, ranks.local(), half, token_idx, slot),
            args.topk_weights[token_idx * Config::num_topk + slot.slot_idx]};
}

}  // namespace deep_moe
