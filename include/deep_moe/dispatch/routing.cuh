// Which top-k slots count. Dispatch and combine must agree on it.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

// A slot names an expert or none: -1 by convention, and whatever else is out of range is ignored
// likewise, because it must never become an address.
template <class Config>
__device__ __forceinline__ bool is_routed(int64_t expert_idx) {
    return expert_idx >= 0 && expert_idx < static_cast<int64_t>(Config::num_experts);  //~ routed
}

}  // namespace deep_moe
