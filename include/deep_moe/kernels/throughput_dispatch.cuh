// Throughput dispatch: tokens go to the ranks of their experts, and into rows by expert there. With
// `knows_rows` they go where an earlier dispatch sent others, and nothing is counted.
//
// Grid: num_ctas CTAs, equal on all ranks, which are all resident at once: they wait for all of
// them. docs/split.md has the protocol.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/arrivals.cuh"
#include "deep_moe/split/claims.cuh"
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

// A CTA's tokens that are shared, and what it fetches.
template <class Config>
struct DispatchClaims {
    Claims tokens;
    Claims fetches;

    __device__ explicit DispatchClaims(uint32_t shared_memory)
        : tokens(shared_memory + Config::Smem::claims_offset),
          fetches(shared_memory + Config::Smem::claims_offset + sizeof(uint32_t)) {}

    // All threads of the CTA; a barrier has to stand behind it, such as that of `Step::begin`.
    __device__ void clear() const {
        if (threadIdx.x != 0) return;
        tokens.clear();
        fetches.clear();
    }
};

// All threads of a CTA: what other ranks need to know and to fetch.
template <class Config>
__device__ void dispatch_share(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                               uint32_t shared_memory, const Claims& claims) {
    const ThroughputBuffer<Config> local = ranks.local();
    if (blockIdx.x == 0) {
        for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
            *ranks.of(i).num_tokens(ranks.rank_idx()) = args.num_tokens;
        }
    }
    constexpr uint32_t sharing_thread = Config::num_threads - warp_size;  // that stamps
    if constexpr (!Config::knows_rows) {
        using Places = SlotPlaces<Config>;
        static_assert(Places::num_warps * warp_size <= sharing_thread, "some count, others share");
        if (ptx::warp_idx() < Places::num_warps) {
            const PhaseSpan<Config> span(args, SplitPhase::count_put);
            Places(args, ranks, shared_memory).find();
        }
    }
    const PhaseSpan<Config> span(args, SplitPhase::quant_and_put, sharing_thread);
    share_tokens(args, local, claims);
}

// All threads of a CTA, which has shared: from the counts of all ranks to where their slots go; to
// be read behind the wait for the tokens. num_counts: dispatches before this one.
template <class Config>
__device__ void dispatch_place(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                               uint32_t shared_memory, uint32_t num_counts, Waiter& waiter) {
    const ThroughputBuffer<Config> local = ranks.local();
    const auto arrivals = [&](uint32_t rank_idx) { return local.count_arrivals(rank_idx); };
    bool have_come = true;
    //~ counts_of_all_awaited
    have_come = await_arrivals<Config>(WaitSite::split_counts, AllRanks{}, arrivals, 1,
                                       WaitCost(nullptr), waiter, num_counts);
    const ExpertPlaces<Config> places(shared_memory);
    if (have_come) places.sum_up(args, local, ranks.rank_idx(), waiter);
}

// All threads of a CTA, when all ranks have shared.
template <class Config>
__device__ void dispatch_pull(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                              uint32_t shared_memory, const Claims& claims) {
    if constexpr (Config::knows_rows) {
        const KnownRows<Config> rows(args);
        TokenPull(args, ranks, rows, claims).run();
    } else {
        const ExpertPlaces<Config> places(shared_memory);
        const CountedRows<Config> rows(places, ranks);
        TokenPull(args, ranks, rows, claims).run();
        tell_slot_rows(args, ranks.local(), places);  // last: nobody waits for it
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
    const DispatchClaims<Config> claims(shared_memory);
    claims.clear();
    const uint32_t num_counts = ptx::ld_relaxed_gpu(ranks.local().num_counts());
    Step<Config> step(ranks, StepKind::tokens, waiter);
    bool is_sound = step.begin();
    if (is_sound) {
        dispatch_share(args, ranks, shared_memory, claims.tokens);
        const PhaseSpan<Config> span(args, SplitPhase::wait);
        step.arrive();
        if constexpr (!Config::knows_rows) {
            dispatch_place(args, ranks, shared_memory, num_counts, waiter);
        }
        is_sound = step.await();  //~ tokens_of_all_awaited
    }
    if (is_sound) {
        const PhaseSpan<Config> span(args, SplitPhase::postprocess);
        if (step.count_on() && !Config::knows_rows) SlotPlaces<Config>::count_on(ranks.local());
        dispatch_pull(args, ranks, shared_memory, claims.fetches);
    }
    step.end();
    last_anchor<Config>(args);
}

}  // namespace deep_moe
