// One row to another place.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/spread_row.cuh"

namespace deep_moe {

// A part of a row of BF16, as much of it as a warp loads at once; read when this is made.
template <class Config>
class RowPart {
    static constexpr uint32_t num_chunks = Config::hidden * sizeof(uint16_t) / sizeof(uint4);
    static constexpr uint32_t chunks_per_lane = ceil_div(num_chunks, warp_size);
    static constexpr uint32_t loads = equal_loads(chunks_per_lane, 16);

 public:
    static constexpr uint32_t per_row = ceil_div(chunks_per_lane, loads);

    // A whole warp.
    __device__ RowPart(const void* row, uint32_t part)
        : first_(part * loads * warp_size + ptx::lane_idx()) {
#pragma unroll
        for (uint32_t i = 0; i < loads; ++i) {
            if (has_chunk(i)) chunks_[i] = static_cast<const uint4*>(row)[chunk_idx(i)];
        }
    }

    // The same part of another row.
    __device__ void store(void* row) const {
#pragma unroll
        for (uint32_t i = 0; i < loads; ++i) {
            if (has_chunk(i)) static_cast<uint4*>(row)[chunk_idx(i)] = chunks_[i];
        }
    }

 private:
    __device__ uint32_t chunk_idx(uint32_t i) const { return first_ + i * warp_size; }
    __device__ bool has_chunk(uint32_t i) const { return chunk_idx(i) < num_chunks; }

    uint32_t first_;
    uint4 chunks_[loads];
};

}  // namespace deep_moe
