// What a token's slots name. Lanes look at one slot each.
//
// A token may name an expert in several slots. It is sent there once, for the first of them, and
// the other slots take the same result. So an expert never gets more rows than there are tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/active_ranks.cuh"

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

// Lanes per token, if several tokens share a warp.
template <class Config>
__device__ constexpr uint32_t slot_lanes() {
    static_assert(Config::num_topk <= warp_size, "one lane per slot");
    uint32_t lanes = 1;
    while (lanes < Config::num_topk) lanes *= 2;
    return lanes;
}

// A whole converged warp, in which `num_lanes` neighbouring lanes look at a token: each at the slot
// of its own place among them. `is_valid`: there is such a token.
template <class Config, uint32_t num_lanes>
__device__ RoutedSlot route_slot(const void* topk_idx, const ActiveRanks<Config>& active,
                                 uint32_t token_idx, bool is_valid) {
    RoutedSlot slot;
    slot.slot_idx = ptx::lane_idx() % num_lanes;
    slot.expert_idx = RoutedSlot::none;
    slot.rank_idx = RoutedSlot::none;
    if (is_valid && slot.slot_idx < Config::num_topk) {
        const int64_t expert_idx =
            load_topk_idx<Config>(topk_idx, token_idx * Config::num_topk + slot.slot_idx);
        if (is_routed<Config>(expert_idx)) {
            const uint32_t rank_idx =
                static_cast<uint32_t>(expert_idx) / Config::num_experts_per_rank;
            if (active.contains(rank_idx)) {
                slot.expert_idx = static_cast<uint32_t>(expert_idx);
                slot.rank_idx = rank_idx;
            }
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

}  // namespace deep_moe
