// Which top-k slots count, and how they are read. Dispatch and combine must agree on it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// A slot names an expert or none. None is -1 by convention; any other id out of range is ignored,
// too, because it must never become an address.
template <class Config>
__device__ __forceinline__ bool is_routed(int64_t expert_idx) {
    return expert_idx >= 0 && expert_idx < static_cast<int64_t>(Config::num_experts);  //~ routed
}

template <class Config>
__device__ __forceinline__ bool owned_by_active(uint32_t expert_idx,
                                                const CallRanks<Config>& ranks) {
    return ranks.contains(expert_idx / Config::num_experts_per_rank);
}

// The same in a fused call: experts of a masked rank are none.
template <class Config>
__device__ __forceinline__ bool is_routed(int64_t expert_idx, const CallRanks<Config>& ranks) {
    return is_routed<Config>(expert_idx) &&
           owned_by_active<Config>(static_cast<uint32_t>(expert_idx), ranks);  //~ routed_to_active
}

// An element of what a router gives, i64 or i32.
template <class Config>
__device__ __forceinline__ int64_t load_topk_idx(const void* topk_idx, uint32_t slot_idx) {
    if constexpr (Config::has_int32_topk_idx) {
        return static_cast<const int32_t*>(topk_idx)[slot_idx];
    } else {
        return static_cast<const int64_t*>(topk_idx)[slot_idx];
    }
}

}  // namespace deep_moe
