// What a token's slots name. Lanes look at one slot each.
//
// A token may name an expert in several slots. It is sent there once, for the first of them, and
// the other slots take the same result. So an expert never gets more rows than there are tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

struct RoutedSlot {
    static constexpr uint32_t none = 0xffffffff;
    uint32_t slot_idx;
    uint32_t expert_idx;            // none: the slot is not used
    uint32_t rank_idx;              // that owns the expert
    uint32_t first_slot_of_expert;  // of the token's slots that name the same expert
    uint32_t first_slot_of_rank;    // the same for experts of the same rank

    __device__ bool is_used() const { return expert_idx != none; }
    __device__ bool is_first_of_expert() const {
        return is_used() && first_slot_of_expert == slot_idx;
    }
    __device__ bool is_first_of_rank() const { return is_used() && first_slot_of_rank == slot_idx; }
};

// A warp's lane, of which `num_lanes` neighbours look at a token: what the slot of its own place
// among them names, or -1. `is_valid`: there is such a token.
template <class Config, uint32_t num_lanes>
__device__ int64_t named_expert(const void* topk_idx, uint32_t token_idx, bool is_valid) {
    const uint32_t slot_idx = ptx::lane_idx() % num_lanes;
    if (!is_valid || slot_idx >= Config::num_topk) return -1;
    return load_topk_idx<Config>(topk_idx, token_idx * Config::num_topk + slot_idx);
}

// A whole converged warp, whose lanes' slots name these experts.
template <class Config, uint32_t num_lanes>
__device__ RoutedSlot route_slot(const ActiveRanks<Config>& active, int64_t expert_idx) {
    RoutedSlot slot;
    slot.slot_idx = ptx::lane_idx() % num_lanes;
    slot.expert_idx = RoutedSlot::none;
    slot.rank_idx = RoutedSlot::none;
    if (is_routed<Config>(expert_idx)) {
        const uint32_t rank_idx = static_cast<uint32_t>(expert_idx) / Config::num_experts_per_rank;
        if (active.contains(rank_idx)) {
            slot.expert_idx = static_cast<uint32_t>(expert_idx);
            slot.rank_idx = rank_idx;
        }
    }
    slot.first_slot_of_expert = slot.slot_idx;
    slot.first_slot_of_rank = slot.slot_idx;
#pragma unroll
    for (uint32_t distance = 1; distance < Config::num_topk; ++distance) {
        const uint32_t expert_idx = __shfl_up_sync(full_warp, slot.expert_idx, distance, num_lanes);
        const uint32_t rank_idx = __shfl_up_sync(full_warp, slot.rank_idx, distance, num_lanes);
        if (slot.slot_idx < distance) continue;
        if (expert_idx == slot.expert_idx) slot.first_slot_of_expert = slot.slot_idx - distance;
        if (rank_idx == slot.rank_idx) slot.first_slot_of_rank = slot.slot_idx - distance;
    }
    return slot;
}

// The same of a token's slots.
template <class Config, uint32_t num_lanes>
__device__ RoutedSlot route_slot(const void* topk_idx, const ActiveRanks<Config>& active,
                                 uint32_t token_idx, bool is_valid) {
    return route_slot<Config, num_lanes>(
        active, named_expert<Config, num_lanes>(topk_idx, token_idx, is_valid));
}

}  // namespace deep_moe
