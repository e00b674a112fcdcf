// The ranks that take part. The host masks dead ranks: nothing is sent to them, no rank waits for
// them, and slots that name their experts count as unused. All other ranks must mask the same ones.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/conditional.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

template <class Config>
class ActiveRanks {
 public:
    // A whole converged warp. `masked_ranks`: u32[num_ranks], not zero for masked ranks.
    __device__ explicit ActiveRanks(const uint32_t* masked_ranks)
        : low_(unmasked(masked_ranks, 0) | uint64_t{unmasked(masked_ranks, warp_size)} << 32),
          high_(unmasked(masked_ranks, 2 * warp_size)) {
        static_assert(Config::num_ranks <= 3 * warp_size);
    }

    // rank_idx < num_ranks.
    __device__ bool contains(uint32_t rank_idx) const {
        const uint64_t word = rank_idx < 64 ? low_ : high_;  //~ mask_word
        return (word >> rank_idx % 64 & 1) != 0;
    }

    __device__ uint32_t count() const { return __popcll(low_) + __popcll(high_); }

 private:
    static __device__ uint32_t unmasked(const uint32_t* masked_ranks, uint32_t first) {
        if (first >= Config::num_ranks) return 0;
        const uint32_t rank_idx = first + ptx::lane_idx();
        const bool is_active = rank_idx < Config::num_ranks && masked_ranks[rank_idx] == 0;
        return __ballot_sync(full_warp, is_active);
    }

    uint64_t low_;   // ranks 0..63
    uint64_t high_;  // ranks 64..
};

// Of a kernel that masks none, as those for many tokens. The fused kernel's machine code must not
// depend on masks: where a condition that is always true changes it all the same,
// `if constexpr (Config::masks_ranks)` stands in front.
template <class Config>
struct AllRanks {
    __device__ explicit AllRanks(const uint32_t* = nullptr) {}
    __device__ constexpr bool contains(uint32_t) const { return true; }
    __device__ constexpr uint32_t count() const { return Config::num_ranks; }
};

// Those of a fused call, of KernelArgs::masked_ranks.
template <class Config>
using CallRanks = conditional_t<Config::masks_ranks, ActiveRanks<Config>, AllRanks<Config>>;

}  // namespace deep_moe
