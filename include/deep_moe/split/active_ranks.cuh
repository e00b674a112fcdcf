// The ranks that take part. The host masks dead ranks: nothing is sent to them, no rank waits for
// them, and slots that name their experts count as unused. All other ranks must mask the same ones.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"

namespace deep_moe {

template <class Config>
class ActiveRanks {
 public:
    // A whole converged warp.
    __device__ explicit ActiveRanks(const LowLatencyBuffer<Config>& local)
        : low_(unmasked(local, 0) | uint64_t{unmasked(local, warp_size)} << 32),
          high_(unmasked(local, 2 * warp_size)) {
        static_assert(Config::num_ranks <= 3 * warp_size);
    }

    // rank_idx < num_ranks.
    __device__ bool contains(uint32_t rank_idx) const {
        const uint64_t word = rank_idx < 64 ? low_ : high_;  //~ mask_word
        return (word >> rank_idx % 64 & 1) != 0;
    }

 private:
    static __device__ uint32_t unmasked(const LowLatencyBuffer<Config>& local, uint32_t first) {
        if (first >= Config::num_ranks) return 0;
        const uint32_t rank_idx = first + ptx::lane_idx();
        const bool is_active = rank_idx < Config::num_ranks && *local.masked_ranks(rank_idx) == 0;
        return __ballot_sync(full_warp, is_active);
    }

    uint64_t low_;   // ranks 0..63
    uint64_t high_;  // ranks 64..
};

}  // namespace deep_moe
