// How the scales of such tokens lie in memory, where the tokens are here when a kernel starts.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

// A float of any size for all values of a token. Index 0 gives it.
struct FloatPerToken {
    static constexpr uint32_t num_words(uint32_t) { return 1; }
    const uint32_t* words;

    __device__ __forceinline__ float operator[](uint32_t) const {
        return __uint_as_float(words[0]);
    }
};

}  // namespace deep_moe
