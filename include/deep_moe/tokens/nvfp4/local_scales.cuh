// How the scales of such tokens lie in memory, where the tokens are here when a kernel starts.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

// A float of the whole token, then an E4M3 byte for every 16 values, the lowest ones' in the lowest
// byte.
struct Nvfp4TokenScales {
    static constexpr uint32_t num_words(uint32_t num_values) { return 1 + num_values / 64; }
    const uint32_t* words;

    __device__ __forceinline__ uint32_t operator[](uint32_t word_idx) const {
        return words[word_idx];
    }
};

}  // namespace deep_moe
