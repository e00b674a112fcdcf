// How many messages this CTA has sent to whom, and telling the receivers. A dispatch's messages are
// tokens, a combine's are parts of rows (RowPart).
//
// A receiver knows how many messages come from each rank, so arrivals are counted in messages, and
// CTAs without any tell nothing. A dispatch with Config::stages_by_expert counts its messages to
// each expert, so that a pair's messages are unpacked when they have come.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// In shared memory, for each receiver: u32[num_ranks], or u32[num_experts].
template <class Config>
class SentMessages {
 public:
    __device__ explicit SentMessages(uint32_t shared_memory)
        : words_(shared_memory + Config::Smem::sent_messages_offset) {}

    // All threads of the CTA, in front of a barrier.
    __device__ void clear() const {
        for (uint32_t i = threadIdx.x; i < num_words; i += Config::num_threads) {
            ptx::st_shared_u32(word(i), 0);  //~ sent_messages_cleared
        }
    }

    // Dispatch. One thread for each receiver: a message more to it. Barriers stand between two
    // messages.
    __device__ void add(uint32_t receiver_idx) const {
        ptx::st_shared_u32(word(receiver_idx), count(receiver_idx) + 1);  //~ message_counted
    }
    // Combine. One thread of a warp, beside those of others.
    __device__ void add_beside_others(uint32_t receiver_idx) const {
        ptx::red_add_shared(word(receiver_idx), 1);  //~ part_counted
    }

    // Dispatch. All threads of a CTA that has sent. `clears`: it has also zeroed words of this rank
    // that others may write to once they know that. All ranks wait for this, so a rank that has
    // received knows that all others have come to this call.
    __device__ void arrive(const LowLatencyRanks<Config>& ranks, const ActiveRanks<Config>& active,
                           uint32_t half, bool clears) const {
        cta_sync<Config>();  //~ all_messages_sent
        if constexpr (Config::stages_by_expert) {
            constexpr uint32_t num_local = Config::num_experts_per_rank;
            for (uint32_t i = threadIdx.x; i < num_words; i += Config::num_threads) {
                const LowLatencyBuffer<Config> owner = ranks.of(i / num_local);
                tell(owner.message_arrivals(half, i % num_local, ranks.rank_idx()), count(i));
            }
        }
        for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
            const uint32_t num_sent = Config::stages_by_expert ? 0 : count(i);
            if (!active.contains(i)) continue;
            tell(ranks.of(i).dispatch_arrivals(half, ranks.rank_idx()), num_sent + clears);
        }
    }
    // Combine. The same.
    __device__ void arrive_in_combine(const LowLatencyRanks<Config>& ranks, uint32_t half) const {
        cta_sync<Config>();  //~ all_parts_sent
        for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
            tell(ranks.of(i).combine_arrivals(half, ranks.rank_idx()), count(i));
        }
    }

    // Order: a barrier has put all writes of the CTA before one thread's release at sys scope for
    // each receiver, which covers them.
    static __device__ void tell(int32_t* arrivals, uint32_t num_messages) {
        if (num_messages == 0) return;
        //~ messages_released
        ptx::red_add_release_sys(arrivals, static_cast<int32_t>(num_messages));
    }

 private:
    static constexpr uint32_t num_words = Config::Smem::sent_messages_dim0;

    __device__ uint32_t count(uint32_t receiver_idx) const {
        return ptx::ld_shared_u32(word(receiver_idx));
    }
    __device__ uint32_t word(uint32_t idx) const { return words_ + idx * sizeof(uint32_t); }

    uint32_t words_;
};

}  // namespace deep_moe
