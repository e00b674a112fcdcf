// Dispatch, sending: tell every rank how many tokens will come, before they do. So receivers know
// the places while tokens travel.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/token_counts.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

// All threads of one CTA. `counts`: of all tokens of this rank.
//
// The word holds nothing but the count, so the stores need no order.
template <class Config>
__device__ void publish_counts(const LowLatencyRanks<Config>& ranks,
                               const ActiveRanks<Config>& active, const TokenCounts<Config>& counts,
                               uint32_t half) {
    constexpr uint32_t num_words = LowLatencyBuffer<Config>::num_count_words;
    for (uint32_t i = threadIdx.x; i < Config::num_ranks * num_words; i += Config::num_threads) {
        const uint32_t rank_idx = i / num_words;
        const uint32_t word_idx = i % num_words;
        if (!active.contains(rank_idx)) continue;
        const uint32_t count =
            word_idx < Config::num_experts_per_rank
                ? counts.of_expert(rank_idx * Config::num_experts_per_rank + word_idx)
                : counts.of_rank(rank_idx);
        ptx::st_relaxed_sys(ranks.of(rank_idx).recv_counts(half, ranks.rank_idx(), word_idx),
                            EncodedCount::encode(count));  //~ count_published
    }
}

// All threads of one CTA: zeros for those who write next to words that they add to or that must say
// "not yet" until then. All are this rank's own.
//
// The dispatch words of the other half belong to the next dispatch. This rank has received the
// dispatch before. A peer sends the next one only after it has seen this rank arrive in this one,
// so after the zeros. The combine words of this half: this rank has combined the call before the
// last one, and a peer's rows of this call come after that arrival, too.
template <class Config>
__device__ void clear_words(const LowLatencyBuffer<Config>& local, uint32_t half) {
    constexpr uint32_t num_counts = Config::num_ranks * LowLatencyBuffer<Config>::num_count_words;
    for (uint32_t i = threadIdx.x; i < num_counts; i += Config::num_threads) {
        ptx::st_relaxed_sys(local.recv_counts(half ^ 1, 0, 0) + i, 0u);  //~ counts_zeroed_ahead
    }
    if constexpr (Config::stages_by_expert) {
        constexpr uint32_t num_pairs = Config::num_experts_per_rank * Config::num_ranks;
        for (uint32_t i = threadIdx.x; i < num_pairs; i += Config::num_threads) {
            ptx::st_relaxed_sys(local.message_arrivals(half ^ 1, 0, 0) + i,
                                0);  //~ message_arrivals_zeroed
        }
    }
    for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
        //~ dispatch_arrivals_zeroed
        ptx::st_relaxed_sys(local.dispatch_arrivals(half ^ 1, i), 0);
        ptx::st_relaxed_sys(local.combine_arrivals(half, i), 0);  //~ combine_arrivals_zeroed
    }
}

}  // namespace deep_moe
