// Dispatch, sending: a token goes once to every rank that owns one of its experts, into the staging
// of this rank there.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/routed_slot.cuh"
#include "deep_moe/split/sent_messages.cuh"
#include "deep_moe/split/slot_lanes.cuh"
#include "deep_moe/split/token_counts.cuh"

namespace deep_moe {

// A token's place in the staging of its source rank.
template <class Config>
struct StagedToken {
    LowLatencyBuffer<Config> buffer;
    uint32_t half;
    uint32_t source_rank_idx;
    uint32_t slot_idx;

    __device__ uint4* values() const {
        return reinterpret_cast<uint4*>(buffer.staged_values(half, source_rank_idx, slot_idx));
    }
    __device__ uint32_t* scales() const {
        return buffer.staged_scales(half, source_rank_idx, slot_idx);
    }
};

// Where the CTA's token goes. In shared memory: how many places, then each as
// rank_idx << 16 | slot in the staging.
template <class Config>
class RankDestinations {
 public:
    __device__ explicit RankDestinations(uint32_t shared_memory)
        : words_(shared_memory + Config::Smem::destinations_offset) {}

    __device__ uint32_t count() const { return ptx::ld_shared_u32(words_); }
    // The i-th of them.
    __device__ StagedToken<Config> get(const LowLatencyRanks<Config>& ranks, uint32_t half,
                                       uint32_t i) const {
        const uint32_t place = ptx::ld_shared_u32(words_ + (1 + i) * sizeof(uint32_t));
        return {ranks.of(place >> 16), half, ranks.rank_idx(), place & 0xffff};
    }

    // A whole warp: finds them for a token, in front of a barrier. `counts`: of all tokens before
    // it. `slot`: the token's that the lane stands for. Returns the RowOfExpert of it.
    __device__ uint32_t find(const TokenCounts<Config>& counts, const SentMessages<Config>& sent,
                             const RoutedSlot& slot) const {
        uint32_t row = RowOfExpert::none;
        if (slot.is_first_of_expert()) {
            row = RowOfExpert::pack(slot.expert_idx % Config::num_experts_per_rank,
                                    counts.of_expert(slot.expert_idx));  //~ row_of_expert
        }
        const uint32_t firsts = __ballot_sync(full_warp, slot.is_first_of_rank());
        if (ptx::lane_idx() == 0) ptx::st_shared_u32(words_, __popc(firsts));
        if (!slot.is_first_of_rank()) return row;
        sent.add(slot.rank_idx);
        const uint32_t slot_idx = counts.of_rank(slot.rank_idx);  //~ slot_of_rank
        const uint32_t i = __popc(firsts & ((1u << ptx::lane_idx()) - 1));
        ptx::st_shared_u32(words_ + (1 + i) * sizeof(uint32_t), slot.rank_idx << 16 | slot_idx);
        return row;
    }

    // The same warp, behind the barrier, while others write values: the token's header to each.
    // Lanes stand for slots of neighbouring destinations. found: what `find` returned.
    __device__ void tell(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                         uint32_t half, uint32_t token_idx, const RoutedSlot& slot,
                         uint32_t found) const {
        constexpr uint32_t lanes = slot_lanes<Config>();
        const uint32_t slot_idx = ptx::lane_idx() % lanes;
        const uint32_t row = __shfl_sync(full_warp, found, slot_idx);
        const uint32_t owner = __shfl_sync(full_warp, slot.rank_idx, slot_idx);
        for (uint32_t i = ptx::lane_idx() / lanes; i < count(); i += warp_size / lanes) {
            const uint32_t place = ptx::ld_shared_u32(words_ + (1 + i) * sizeof(uint32_t));
            const uint32_t rank_idx = place >> 16;
            uint32_t* const header =
                ranks.of(rank_idx).staged_headers(half, ranks.rank_idx(), place & 0xffff);
            if (slot_idx < Config::num_topk) {
                header[LowLatencyBuffer<Config>::num_header_words + slot_idx] =
                    owner == rank_idx ? row : RowOfExpert::none;  //~ header_written
            }
            if (slot_idx == 0) {
                header[0] = token_idx;
                if constexpr (Config::relays_tokens) {
                    header[1] = static_cast<uint32_t>(args.origins[token_idx]);
                }
            }
        }
    }

 private:
    uint32_t words_;
};

}  // namespace deep_moe
