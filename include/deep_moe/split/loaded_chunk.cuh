// A lane's part of a token before it is quantized.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/split/token_format.cuh"

namespace deep_moe {

// BF16 values that become a chunk of a token; zeros if there is no such chunk.
template <class Config>
struct LoadedChunk {
    using Format = TokenFormat<Config>;
    uint4 values[Format::num_loads];

    LoadedChunk() = default;
    // tokens: bf16 [T, hidden].
    __device__ LoadedChunk(const void* tokens, uint32_t token_idx, uint32_t chunk_idx) {
        const auto* const x = static_cast<const uint4*>(tokens) +
                              uint64_t{token_idx} * Format::num_chunks * Format::num_loads;
#pragma unroll
        for (uint32_t i = 0; i < Format::num_loads; ++i) {
            const bool is_valid = chunk_idx < Format::num_chunks;
            values[i] = is_valid ? x[chunk_idx * Format::num_loads + i] : uint4{};
        }
    }
};

}  // namespace deep_moe
