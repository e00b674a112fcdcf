// Which warps of a CTA do what in the throughput kernels.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"

namespace deep_moe {

// The last warps share what is left behind the CTA's first part, while the others fetch.
template <class Config>
inline constexpr uint32_t sharing_warps = max(1u, Config::num_threads / warp_size / 4);
template <class Config>
inline constexpr uint32_t fetching_warps = Config::num_threads / warp_size - sharing_warps<Config>;

}  // namespace deep_moe
