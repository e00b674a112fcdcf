// Low-latency dispatch: tokens to the ranks of their experts, and into rows by expert there. In one
// kernel, or in two: `sends` and `receives` say which parts this one has. A token goes once to each
// rank of its experts, or, with `stages_by_expert`, to each of its experts.
//
// Grid: num_ctas CTAs, equal on all ranks; those that receive wait for all of them, so they are all
// resident at once. docs/split.md has the protocol.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/conditional.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/arrivals.cuh"
#include "deep_moe/split/call.cuh"
#include "deep_moe/split/expand_tokens.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/phase_span.cuh"
#include "deep_moe/split/publish_counts.cuh"
#include "deep_moe/split/receive_counts.cuh"
#include "deep_moe/split/send_tokens.cuh"
#include "deep_moe/split/sent_messages.cuh"
#include "deep_moe/split/token_counts.cuh"
#include "deep_moe/split/unpack_messages.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// With few tokens the last CTAs have none: they are free for the counts, and for what the next call
// needs.
template <class Config>
inline constexpr uint32_t counting_cta = Config::num_ctas - 1;
template <class Config>
inline constexpr uint32_t clearing_cta = Config::num_ctas > 2 ? Config::num_ctas - 2 : 0;

template <class Config>
__device__ void dispatch_send(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                              const ActiveRanks<Config>& active, uint32_t shared_memory,
                              uint32_t call_idx, const NextToken<Config>& first_token,
                              const Waiter& waiter) {
    const LowLatencyBuffer<Config> local = ranks.local();
    const uint32_t half = half_of(call_idx);
    const TokenCounts<Config> counts(shared_memory);
    const SentMessages<Config> sent(shared_memory);
    if (blockIdx.x == clearing_cta<Config>) {
        clear_words(local, half);
        if (threadIdx.x == 0) *args.call_idx = call_idx;
    }
    if (blockIdx.x == counting_cta<Config>) {
        const PhaseSpan<Config> span(args, SplitPhase::count_put);
        counts.add(args.topk_idx, active, 0, args.num_tokens);
        publish_counts(ranks, active, counts, half);
        keep_row_counts(args, counts);
        cta_sync<Config>();  //~ counts_read
        counts.clear();      // for its own tokens
        cta_sync<Config>();  //~ counts_cleared
    }
    {
        const PhaseSpan<Config> span(args, SplitPhase::quant_and_put);
        send_tokens(args, ranks, active, counts, sent, shared_memory, half, first_token);
        sent.arrive(ranks, active, half, blockIdx.x == clearing_cta<Config>);
    }
    // The first warps wait for what other ranks send.
    if (ptx::warp_idx() == Config::num_threads / warp_size - 1) end_sending(local, waiter);
}

// With Config::stages_by_expert, the CTA of `cost`: what is waited for pair by pair, rank by rank.
template <class Config>
__device__ void tell_wait_cost(const LowLatencyBuffer<Config>& local,
                               const ActiveRanks<Config>& active,
                               const ReceivedTokens<Config>& received, uint32_t half,
                               const WaitCost& cost, Waiter& waiter) {
    for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
        if (!active.contains(i)) continue;
        for (uint32_t expert_idx = 0; expert_idx < Config::num_experts_per_rank; ++expert_idx) {
            await_arrivals_of(WaitSite::split_tokens, local.message_arrivals(half, expert_idx, i),
                              i, received.num_rows(expert_idx, i), waiter);
        }
        cost.add(i);
    }
    __syncwarp();
}

// All threads of a CTA: until it knows where tokens go and all ranks have come to the call; unless
// each pair's messages are waited for, until all tokens are here.
template <class Config>
__device__ bool await_tokens(const LowLatencyArgs& args, const LowLatencyBuffer<Config>& local,
                             const ActiveRanks<Config>& active,
                             const ReceivedTokens<Config>& received, uint32_t half,
                             Waiter& waiter) {
    const PhaseSpan<Config> span(args, SplitPhase::wait);
    const WaitCost cost(args.wait_cycles);
    if (!received.acquire(local, active, half, waiter)) return false;
    received.sum_up(args, blockIdx.x == 0);
    const auto arrivals = [&](uint32_t rank_idx) {
        return local.dispatch_arrivals(half, rank_idx);
    };
    const auto num_expected = [&](uint32_t rank_idx) {
        return received.tokens_of(rank_idx) + 1;  //~ tokens_expected
    };
    bool is_sound = true;
    //~ staging_awaited
    is_sound =
        await_arrivals<Config>(WaitSite::split_tokens, active, arrivals, num_expected,
                               Config::stages_by_expert ? WaitCost(nullptr) : cost, waiter, 0);
    if constexpr (Config::stages_by_expert) {
        if (is_sound && cost.is_asked())
            tell_wait_cost(local, active, received, half, cost, waiter);
    }
    return is_sound;
}

template <class Config>
__device__ void dispatch_receive(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                                 const ActiveRanks<Config>& active, uint32_t shared_memory,
                                 uint32_t call_idx, Waiter& waiter) {
    const LowLatencyBuffer<Config> local = ranks.local();
    const uint32_t half = half_of(call_idx);
    const ReceivedTokens<Config> received(shared_memory);
    if (!await_tokens(args, local, active, received, half, waiter)) return;
    const PhaseSpan<Config> span(args, SplitPhase::postprocess);
    using Unpacking =
        conditional_t<Config::stages_by_expert, MessageUnpacking<Config>, TokenExpansion<Config>>;
    Unpacking(args, ranks, received, half).run(waiter);
}

template <class Config>
__device__ __forceinline__ void low_latency_dispatch(const LowLatencyArgs& args) {
    static_assert(Config::sends || Config::receives);
    static_assert(Config::num_threads % warp_size == 0);
    extern __shared__ __align__(16) uint8_t shared_bytes[];
    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    const LowLatencyRanks<Config> ranks(args);
    const LowLatencyBuffer<Config> local = ranks.local();
    first_anchor<Config>(args);
    // All loads that depend on nothing are started before the first wait.
    const CallState state(local);
    const uint32_t call_idx = Config::sends ? state.num_calls : *args.call_idx;
    NextToken<Config> first_token(args, blockIdx.x);
    const ActiveRanks<Config> active(local.masked_ranks(0));
    first_token.route(args, active, blockIdx.x);
    Waiter waiter(args);
    bool is_sound;
    if constexpr (Config::sends) {
        // In front of the barrier that the call begins with.
        TokenCounts<Config>(shared_memory).clear();
        SentMessages<Config>(shared_memory).clear();
        is_sound = begin_call<Config>(state, waiter);
        if (is_sound) {
            dispatch_send(args, ranks, active, shared_memory, call_idx, first_token, waiter);
        }
    } else {
        is_sound = resume_call<Config>(state, call_idx, waiter);
    }
    if constexpr (Config::receives) {
        if (is_sound) dispatch_receive(args, ranks, active, shared_memory, call_idx, waiter);
    }
    if (waiter.aborted()) stop_later_kernels(local);  // warps wait for pairs of their own
    last_anchor<Config>(args);
}

}  // namespace deep_moe
