// Dispatch, sending, with Config::stages_by_expert: a token goes to every one of its experts, a
// message for each, into the staging that the expert has for this rank.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/message.cuh"
#include "deep_moe/split/routed_slot.cuh"
#include "deep_moe/split/sent_messages.cuh"
#include "deep_moe/split/token_counts.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// Where the CTA's token goes. In shared memory: how many places, then each as
// expert_idx << 16 | slot in the staging.
template <class Config>
class ExpertDestinations {
 public:
    __device__ explicit ExpertDestinations(uint32_t shared_memory)
        : words_(shared_memory + Config::Smem::destinations_offset) {}

    __device__ uint32_t count() const { return ptx::ld_shared_u32(words_); }
    // The i-th of them.
    __device__ Message<Config, uint8_t> get(const LowLatencyRanks<Config>& ranks, uint32_t half,
                                            uint32_t i) const {
        return message(ranks, half, ptx::ld_shared_u32(words_ + (1 + i) * sizeof(uint32_t)));
    }

    // A whole warp: finds them for a token, in front of a barrier. `counts`: of all tokens before
    // it. `slot`: the token's that the lane stands for. Returns its place.
    __device__ uint32_t find(const TokenCounts<Config>& counts, const SentMessages<Config>& sent,
                             const RoutedSlot& slot) const {
        const uint32_t firsts = __ballot_sync(full_warp, slot.is_first_of_expert());
        if (ptx::lane_idx() == 0) ptx::st_shared_u32(words_, __popc(firsts));
        if (!slot.is_first_of_expert()) return 0;
        sent.add(slot.expert_idx);
        const uint32_t slot_idx = counts.of_expert(slot.expert_idx);  //~ message_slot
        const uint32_t place = slot.expert_idx << 16 | slot_idx;
        const uint32_t i = __popc(firsts & ((1u << ptx::lane_idx()) - 1));
        ptx::st_shared_u32(words_ + (1 + i) * sizeof(uint32_t), place);
        return place;
    }

    // The same warp, behind the barrier, while others write values: the token's control to each.
    // found: what `find` returned.
    __device__ void tell(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                         uint32_t half, uint32_t token_idx, const RoutedSlot& slot,
                         uint32_t found) const {
        if (!slot.is_first_of_expert()) return;
        uint32_t origin = 0;
        if constexpr (Config::relays_tokens) {
            origin = static_cast<uint32_t>(args.origins[token_idx]);
        }
        *message(ranks, half, found).control() = {
            token_idx, slot.slot_idx, origin, {}};  //~ control_written
    }

 private:
    static __device__ Message<Config, uint8_t> message(const LowLatencyRanks<Config>& ranks,
                                                       uint32_t half, uint32_t place) {
        const uint32_t expert_idx = place >> 16;
        const LowLatencyBuffer<Config> owner = ranks.of(expert_idx / Config::num_experts_per_rank);
        return Message<Config, uint8_t>(
            owner.message(half, expert_idx % Config::num_experts_per_rank, ranks.rank_idx(),
                          place & 0xffff));  //~ message_place
    }

    uint32_t words_;
};

}  // namespace deep_moe
