// Dispatch, sending: tell every rank how many tokens will come, before they do. So receivers know
// the places while tokens travel.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
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

// The same, beside it: what the combine has to know, how many rows each rank's experts have of this
// rank's tokens. The last warps, for the first ones publish.
template <class Config>
__device__ void keep_row_counts(const LowLatencyArgs& args, const TokenCounts<Config>& counts) {
    constexpr uint32_t num_warps = Config::num_threads / warp_size;
    for (uint32_t rank_idx = num_warps - 1 - ptx::warp_idx(); rank_idx < Config::num_ranks;
         rank_idx += num_warps) {
        uint32_t num_rows = 0;
        for (uint32_t i = ptx::lane_idx(); i < Config::num_experts_per_rank; i += warp_size) {
            num_rows += counts.of_expert(rank_idx * Config::num_experts_per_rank + i);
        }
        num_rows = ptx::redux_sync_add(num_rows);
        if (ptx::lane_idx() == 0) args.sent_rows[rank_idx] = num_rows;  //~ row_count_kept
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
