// Counts how many of a rank's tokens, up to one of them, go to each expert and to each rank. The
// count is the next token's place among them. Every CTA counts for itself, so it asks no other, and
// places do not depend on which CTA comes first.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/routed_slot.cuh"
#include "deep_moe/split/slot_lanes.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// In shared memory: u32[num_experts + num_ranks].
template <class Config>
class TokenCounts {
 public:
    __device__ explicit TokenCounts(uint32_t shared_memory)
        : words_(shared_memory + Config::Smem::token_counts_offset) {}

    __device__ uint32_t of_expert(uint32_t expert_idx) const {
        return ptx::ld_shared_u32(word(expert_idx));
    }
    __device__ uint32_t of_rank(uint32_t rank_idx) const {
        return ptx::ld_shared_u32(word(Config::num_experts + rank_idx));
    }

    // All threads of the CTA, in front of a barrier.
    __device__ void clear() const {
        for (uint32_t i = threadIdx.x; i < num_words; i += Config::num_threads) {
            ptx::st_shared_u32(word(i), 0);
        }
    }

    // All threads of the CTA: adds the tokens from `begin` up to, but not with, `end`; a barrier
    // stands behind it.
    __device__ void add(const void* topk_idx, const ActiveRanks<Config>& active, uint32_t begin,
                        uint32_t end) const {
        constexpr uint32_t lanes = slot_lanes<Config>();
        constexpr uint32_t tokens_per_round = Config::num_threads / lanes;
        const uint32_t first = begin + threadIdx.x / warp_size * (warp_size / lanes);
        for (uint32_t i = first; i < end; i += tokens_per_round) {
            const uint32_t token_idx = i + ptx::lane_idx() / lanes;
            const RoutedSlot slot =
                route_slot<Config, lanes>(topk_idx, active, token_idx, token_idx < end);
            if (slot.is_first_of_expert()) ptx::red_add_shared(word(slot.expert_idx), 1);
            if (slot.is_first_of_rank()) {
                ptx::red_add_shared(word(Config::num_experts + slot.rank_idx), 1);
            }
        }
        cta_sync<Config>();  //~ tokens_counted
    }

 private:
    static constexpr uint32_t num_words = Config::Smem::token_counts_dim0;
    static_assert(num_words == Config::num_experts + Config::num_ranks);

    __device__ uint32_t word(uint32_t idx) const { return words_ + idx * sizeof(uint32_t); }

    uint32_t words_;
};

}  // namespace deep_moe
