// Scale words of a token that a warp copies out of another rank's memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// All of them are loaded before one is stored. A loop that loads and stores takes a trip over the
// link for each 32 words, because no load may be moved in front of a store that could be to the
// same place. A whole warp calls everything.
template <uint32_t num_words>
class ScaleWords {
    static constexpr uint32_t num_steps = ceil_div(num_words, warp_size);

 public:
    // Those of `words`, a pointer or what LocalRows has, from `first` on.
    template <class Words>
    __device__ __forceinline__ explicit ScaleWords(const Words& words, uint32_t first = 0) {
#pragma unroll
        for (uint32_t step = 0; step < num_steps; ++step) {
            words_[step] = words[first + min(word_of(step), num_words - 1)];
        }
    }

    // place(i): where word i goes.
    template <class Place>
    __device__ __forceinline__ void store(const Place& place) const {
#pragma unroll
        for (uint32_t step = 0; step < num_steps; ++step) {
            const uint32_t i = word_of(step);
            if (i < num_words) *place(i) = words_[step];
        }
    }

 private:
    static __device__ uint32_t word_of(uint32_t step) { return step * warp_size + ptx::lane_idx(); }

    uint32_t words_[num_steps];
};

}  // namespace deep_moe
