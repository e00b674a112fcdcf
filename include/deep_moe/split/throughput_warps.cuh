// Which warps of a CTA do what in the throughput kernels.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"

namespace deep_moe {

// The last warps share what is left behind the CTA's first part, while the others fetch. With half
// of them a combine of 1024 tokens took 193 us on two H200s, with a quarter 212.
template <class Config>
inline constexpr uint32_t sharing_warps = max(1u, Config::num_threads / warp_size / 2);
template <class Config>
inline constexpr uint32_t fetching_warps = Config::num_threads / warp_size - sharing_warps<Config>;

}  // namespace deep_moe
