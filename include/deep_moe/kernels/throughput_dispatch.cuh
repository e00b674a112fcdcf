// Throughput dispatch: tokens to the ranks of their experts, and into rows by expert there. With
// `knows_rows` they go where an earlier dispatch sent others, and nothing is counted.
//
// Grid: num_ctas CTAs, equal on all ranks, which are all resident at once: they wait for all of
// them. docs/split.md has the protocol.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/expert_places.cuh"
#include "deep_moe/split/phase_span.cuh"
#include "deep_moe/split/pull_tokens.cuh"
#include "deep_moe/split/pulled_rows.cuh"
#include "deep_moe/split/share_tokens.cuh"
#include "deep_moe/split/slot_places.cuh"
#include "deep_moe/split/step.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// All threads of a CTA: what other ranks need to know and to fetch.
template <class Config>
__device__ bool dispatch_share(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                               uint32_t shared_memory, Waiter& waiter) {
    const ThroughputBuffer<Config> local = ranks.local();
    if (blockIdx.x == 0) {
        for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
            *ranks.of(i).num_tokens(ranks.rank_idx()) = args.num_tokens;
        }
    }
    if constexpr (Config::knows_rows) {
        const PhaseSpan<Config> span(args, SplitPhase::quant_and_put);
        share_tokens(args, local, 0);
        return true;
    } else {
        static_assert(Config::num_threads > warp_size, "one warp counts, the others share");
        const PhaseSpan<Config> span(args, SplitPhase::count_put);
        const SlotPlaces<Config> places(args, ranks, shared_memory);
        places.clear();
        if (ptx::warp_idx() == 0) {
            places.count();
        } else {
            const PhaseSpan<Config> share_span(args, SplitPhase::quant_and_put, warp_size);
            share_tokens(args, local, 1);
        }
        return places.add_earlier_ctas(waiter);
    }
}

template <class Config, class Rows>
__device__ void pull_tokens(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                            const Rows& rows) {
    const TokenPull<Config, Rows> pull(args, ranks, rows);
    pull.run();
    pull.clear_padding();
}

// All threads of a CTA, when all ranks have shared.
template <class Config>
__device__ void dispatch_pull(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                              uint32_t shared_memory, Waiter& waiter) {
    if constexpr (Config::knows_rows) {
        pull_tokens(args, ranks, KnownRows<Config>(args));
    } else {
        const ThroughputBuffer<Config> local = ranks.local();
        const ExpertPlaces<Config> places(shared_memory);
        if (!places.sum_up(args, local, ranks.rank_idx(), waiter)) return;
        pull_tokens(args, ranks, CountedRows<Config>(places, ranks));
        tell_slot_rows(args, local, places);  // last: nobody waits for it
    }
}

template <class Config>
__device__ __forceinline__ void throughput_dispatch(const ThroughputArgs& args) {
    static_assert(Config::num_threads % warp_size == 0);
    static_assert(Config::num_topk <= warp_size, "one lane per slot");
    extern __shared__ __align__(16) uint8_t shared_bytes[];
    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    const ThroughputRanks<Config> ranks(args);
    Waiter waiter(args);
    first_anchor<Config>(args);
    Step<Config> step(ranks, StepKind::tokens, waiter);
    bool is_sound = step.begin() && dispatch_share(args, ranks, shared_memory, waiter);
    if (is_sound) {
        const PhaseSpan<Config> span(args, SplitPhase::wait);
        step.arrive();
        is_sound = step.await();  //~ tokens_of_all_awaited
    }
    if (is_sound) {
        const PhaseSpan<Config> span(args, SplitPhase::postprocess);
        dispatch_pull(args, ranks, shared_memory, waiter);
    }
    if (step.end() && !Config::knows_rows) SlotPlaces<Config>::count_on(ranks.local());
    last_anchor<Config>(args);
}

}  // namespace deep_moe
