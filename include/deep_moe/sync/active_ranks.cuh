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
    static constexpr uint32_t num_words = ceil_div(Config::num_ranks, warp_size);

 public:
    // What a lane has loaded of the mask. Nobody waits for it before `ActiveRanks` is made of it:
    // the load is under way together with others that stand between.
    class Mask {
     public:
        // masked_ranks: u32[num_ranks], not zero for masked ranks.
        __device__ explicit Mask(const uint32_t* masked_ranks) {
#pragma unroll
            for (uint32_t i = 0; i < num_words; ++i) {
                const uint32_t rank_idx = i * warp_size + ptx::lane_idx();
                words_[i] = rank_idx < Config::num_ranks ? masked_ranks[rank_idx] : 1;
            }
        }

     private:
        friend class ActiveRanks;
        uint32_t words_[num_words];
    };

    // A whole converged warp.
    __device__ explicit ActiveRanks(const Mask& mask)
        : low_(unmasked<0>(mask) | uint64_t{unmasked<1>(mask)} << 32), high_(unmasked<2>(mask)) {
        static_assert(num_words <= 3);
    }
    __device__ explicit ActiveRanks(const uint32_t* masked_ranks)
        : ActiveRanks(Mask(masked_ranks)) {}

    // rank_idx < num_ranks.
    __device__ bool contains(uint32_t rank_idx) const {
        const uint64_t word = rank_idx < 64 ? low_ : high_;  //~ mask_word
        return (word >> rank_idx % 64 & 1) != 0;
    }

    __device__ uint32_t count() const { return __popcll(low_) + __popcll(high_); }

 private:
    template <uint32_t word_idx>
    static __device__ uint32_t unmasked(const Mask& mask) {
        if constexpr (word_idx >= num_words) {
            return 0;
        } else {
            return __ballot_sync(full_warp, mask.words_[word_idx] == 0);
        }
    }

    uint64_t low_;   // ranks 0..63
    uint64_t high_;  // ranks 64..
};

// Of a kernel that masks none. Its machine code must not depend on masks: where a condition that is
// always true changes it all the same, `if constexpr (Config::masks_ranks)` stands in front.
template <class Config>
struct AllRanks {
    struct Mask {
        __device__ explicit Mask(const uint32_t*) {}
    };
    __device__ explicit AllRanks(const Mask&) {}
    __device__ explicit AllRanks(const uint32_t* = nullptr) {}
    __device__ constexpr bool contains(uint32_t) const { return true; }
    __device__ constexpr uint32_t count() const { return Config::num_ranks; }
};

// Those of a fused call or a step for many tokens, of the arguments' `masked_ranks`.
template <class Config>
using CallRanks = conditional_t<Config::masks_ranks, ActiveRanks<Config>, AllRanks<Config>>;

}  // namespace deep_moe
