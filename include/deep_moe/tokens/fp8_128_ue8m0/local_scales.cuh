// How the scales of such tokens lie in memory, where the tokens are here when a kernel starts.
// Indexed by the block of 128 values, they give what kernels know: a UE8M0 byte for every 32
// values, the lowest ones' in the lowest byte; or, for kernels that multiply by them, the float.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/equal_scale_bytes.cuh"

namespace deep_moe {

// A UE8M0 byte for every 128 values.
struct ByteScalesPer128 {
    static constexpr uint32_t num_words(uint32_t num_values) { return num_values / 512; }
    const uint32_t* words;

    __device__ __forceinline__ uint32_t operator[](uint32_t block_idx) const {
        return (words[block_idx / 4] >> 8 * (block_idx % 4) & 0xff) * same_four_bytes;
    }
};

}  // namespace deep_moe
