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
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/expert_places.cuh"
#include "deep_moe/split/phase_span.cuh"
#include "deep_moe/split/pull_tokens.cuh"
#include "deep_moe/split/pulled_rows.cuh"
#include "deep_moe/split/share_tokens.cuh"
#include "deep_moe/split/slot_places.cuh"
#include "deep_moe/split/step.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/throughput_warps.cuh"
#include "deep_moe/split/token_block.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// A CTA's tokens that are shared first, and what it fetches.
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

// All threads of a CTA: what other ranks need to know, and the first part of what they fetch.
template <class Config>
__device__ void dispatch_share(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                               uint32_t shared_memory, const Claims& claims,
                               const TokenBlock<Config>& block, const TokenParts& parts) {
    constexpr uint32_t sharing_thread = Config::num_threads - warp_size;  // that stamps
    if constexpr (!Config::knows_rows) {
        if (ptx::warp_idx() < SlotPlaces<Config>::num_warps) {
            const PhaseSpan<Config> span(args, SplitPhase::count_put);
            SlotPlaces<Config>(args, ranks, shared_memory).find();
        }
    }
    const PhaseSpan<Config> span(args, SplitPhase::quant_and_put, sharing_thread);
    for (uint32_t i = claims.next(); i < parts.end(0); i = claims.next()) {
        share_token(args, ranks.local(), block.begin + i);
    }
}

// The warps that share, while others fetch: all parts but the first.
template <class Config>
__device__ void dispatch_share_rest(const ThroughputArgs& args,
                                    const ThroughputRanks<Config>& ranks, const Step<Config>& step,
                                    const TokenBlock<Config>& block, const TokenParts& parts) {
    const uint32_t warp = ptx::warp_idx() - fetching_warps<Config>;
    for (uint32_t part = 1; part < parts.count(); ++part) {
        for (uint32_t i = parts.begin(part) + warp; i < parts.end(part);
             i += sharing_warps<Config>) {
            share_token(args, ranks.local(), block.begin + i);
        }
        step.tell_all(warp, [&](uint32_t) { return parts.units(part); });
    }
}

// All threads of the group that fetches: from the counts of all ranks to where their slots go.
// num_counts: dispatches before this one.
template <class Config>
__device__ bool dispatch_place(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                               const ExpertPlaces<Config>& places, uint32_t num_counts,
                               const FirstWarps& group, Waiter& waiter) {
    const ThroughputBuffer<Config> local = ranks.local();
    const auto arrivals = [&](uint32_t rank_idx) { return local.count_arrivals(rank_idx); };
    const auto once = [](uint32_t) { return 1; };
    bool have_come = true;
    //~ counts_of_all_awaited
    have_come = await_arrivals<Config>(WaitSite::split_counts, ranks.active(), arrivals, once,
                                       WaitCost(nullptr), waiter, num_counts, group);
    return have_come && places.sum_up(args, local, ranks.active(), ranks.rank_idx(), group, waiter);
}

// All threads of the group that fetches, which begins while ranks still share.
template <class Config>
__device__ void dispatch_fetch(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                               const Step<Config>& step, uint32_t shared_memory,
                               const Claims& claims, uint32_t num_counts, const FirstWarps& group,
                               Waiter& waiter) {
    if constexpr (Config::knows_rows) {
        const PhaseSpan<Config> span(args, SplitPhase::postprocess);
        const KnownRows<Config> rows(args);
        TokenPull(args, ranks, rows, claims).run(step, waiter);
    } else {
        const ExpertPlaces<Config> places(shared_memory);
        {
            const PhaseSpan<Config> span(args, SplitPhase::wait);
            if (!dispatch_place(args, ranks, places, num_counts, group, waiter)) return;
        }
        const PhaseSpan<Config> span(args, SplitPhase::postprocess);
        const CountedRows<Config> rows(places, ranks);
        TokenPull(args, ranks, rows, claims).run(step, waiter);
        tell_slot_rows(args, ranks.local(), places, group);  // last: nobody waits for it
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
    Step<Config> step(ranks, StepKind::tokens);
    if (step.begin(waiter)) {
        const TokenBlock<Config> block(args.num_tokens);
        const TokenParts parts(block.size());
        dispatch_share(args, ranks, shared_memory, claims.tokens, block, parts);
        {
            const PhaseSpan<Config> span(args, SplitPhase::wait);  // with counts, until they come
            step.arrive([&](uint32_t) { return parts.units(0); });
        }
        if (step.count_on(waiter) && !Config::knows_rows) {
            SlotPlaces<Config>::count_on(ranks.local());
        }
        const bool all_fetch = parts.count() == 1;
        if (all_fetch || ptx::warp_idx() < fetching_warps<Config>) {
            const uint32_t num_warps =
                all_fetch ? Config::num_threads / warp_size : fetching_warps<Config>;
            const FirstWarps group = {NamedBarrier::fetching, num_warps * warp_size};
            dispatch_fetch(args, ranks, step, shared_memory, claims.fetches, num_counts, group,
                           waiter);
        } else {
            dispatch_share_rest(args, ranks, step, block, parts);
        }
    }
    step.end(waiter);
    last_anchor<Config>(args);
}

}  // namespace deep_moe
