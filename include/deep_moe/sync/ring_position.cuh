// A position in a ring of pipeline stages, and the parity of the round it is in.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

// A consumer waits for `parity`; a producer waits for `parity ^ 1`, which a fresh barrier grants at
// once, so that the first round finds every stage free.
template <uint32_t num_stages>
struct RingPosition {
    uint32_t stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == num_stages) {
            stage = 0;
            parity ^= 1;
        }
    }

    // The same so many times.
    __device__ __forceinline__ void advance(uint32_t num_times) {
        stage += num_times;
        parity ^= stage / num_stages % 2;
        stage %= num_stages;
    }

    __device__ __forceinline__ static uint32_t stage_before(uint32_t stage) {
        return (stage == 0 ? num_stages : stage) - 1;
    }
    __device__ __forceinline__ RingPosition before() const {
        return {stage_before(stage), stage == 0 ? parity ^ 1 : parity};
    }
};

}  // namespace deep_moe
