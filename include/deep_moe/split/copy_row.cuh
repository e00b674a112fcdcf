// One row to another place.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/spread_row.cuh"

namespace deep_moe {

// A row of BF16, by a whole warp.
template <class Config>
__device__ void copy_row(void* to, const void* from) {
    constexpr uint32_t num_chunks = Config::hidden * sizeof(uint16_t) / sizeof(uint4);
    constexpr uint32_t loads_at_once = equal_loads(ceil_div(num_chunks, warp_size), 16);
#pragma unroll 1
    for (uint32_t first = ptx::lane_idx(); first < num_chunks; first += loads_at_once * warp_size) {
        uint4 chunks[loads_at_once];
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size;
            if (chunk_idx < num_chunks) chunks[i] = static_cast<const uint4*>(from)[chunk_idx];
        }
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size;
            if (chunk_idx < num_chunks) static_cast<uint4*>(to)[chunk_idx] = chunks[i];
        }
    }
    __syncwarp();
}

}  // namespace deep_moe
