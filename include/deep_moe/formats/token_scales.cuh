// How the scales of a token may lie in memory. Indexed by the block of 128 values, each gives what
// kernels know: a UE8M0 byte for every 32 values, the lowest ones' in the lowest byte; or, for
// those that multiply by them, the float.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

inline constexpr uint32_t same_four_bytes = 0x01010101;

// There are none.
struct NoTokenScales {};

// A UE8M0 byte for every 32 values.
struct ByteScalesPer32 {
    static constexpr uint32_t values_per_word = 128;
    const uint32_t* words;

    __device__ __forceinline__ uint32_t operator[](uint32_t block_idx) const {
        return words[block_idx];
    }
};

// A UE8M0 byte for every 128 values.
struct ByteScalesPer128 {
    static constexpr uint32_t values_per_word = 512;
    const uint32_t* words;

    __device__ __forceinline__ uint32_t operator[](uint32_t block_idx) const {
        return (words[block_idx / 4] >> 8 * (block_idx % 4) & 0xff) * same_four_bytes;
    }
};

// A power of two for every 128 values, as a float: its exponent is the byte.
struct FloatPowersPer128 {
    static constexpr uint32_t values_per_word = 128;
    const uint32_t* words;

    __device__ __forceinline__ uint32_t operator[](uint32_t block_idx) const {
        return (words[block_idx] >> 23 & 0xff) * same_four_bytes;
    }
};

// A float of any size for every 128 values, for kernels that multiply by it.
struct FloatsPer128 {
    static constexpr uint32_t values_per_word = 128;
    const uint32_t* words;

    __device__ __forceinline__ float operator[](uint32_t block_idx) const {
        return __uint_as_float(words[block_idx]);
    }
};

}  // namespace deep_moe
