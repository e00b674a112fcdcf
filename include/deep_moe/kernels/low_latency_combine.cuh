// Low-latency combine: the experts' rows go back to the tokens' ranks and are added there. In one
// kernel, or in two: `sends` and `receives` say which parts this one has. With `fetches_rows` the
// rows stay where the experts wrote them, and the tokens' ranks fetch them. With `repeats` the call
// has been combined before.
//
// Grid: as dispatch's.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/arrivals.cuh"
#include "deep_moe/split/call.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/phase_span.cuh"
#include "deep_moe/split/reduce_slots.cuh"
#include "deep_moe/split/row_arrivals.cuh"
#include "deep_moe/split/send_rows.cuh"
#include "deep_moe/split/sent_messages.cuh"
#include "deep_moe/split/sent_rows.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void low_latency_combine(const LowLatencyArgs& args) {
    static_assert(Config::sends || Config::receives);
    static_assert(Config::num_threads % warp_size == 0);
    extern __shared__ __align__(16) uint8_t shared_bytes[];
    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    const LowLatencyRanks<Config> ranks(args);
    const LowLatencyBuffer<Config> local = ranks.local();
    first_anchor<Config>(args);
    // All loads that depend on nothing are started before the first wait.
    const CallState state(local);
    const uint32_t call_idx = *args.call_idx;
    const typename ActiveRanks<Config>::Mask mask(local.masked_ranks(0));
    const FirstCounts<Config> counts(args.recv_count);
    const RowArrivals<Config> arrivals(ranks, shared_memory);
    const SentMessages<Config> sent(shared_memory);
    // In front of the barrier that the kernel begins with.
    sent.clear();
    arrivals.expect(args.sent_rows);
    const ActiveRanks<Config> active(mask);
    Waiter waiter(args);
    bool is_sound = resume_call<Config>(state, call_idx, waiter);
    const uint32_t half = half_of(call_idx);
    if constexpr (Config::sends && Config::repeats) {
        // No rank's rows are written again before all ranks have added the earlier ones. They have
        // when this kernel begins on them.
        if (is_sound) arrivals.come(active, half);
        is_sound = is_sound && arrivals.await_ranks(args, active, half, WaitCost(args.wait_cycles),
                                                    waiter);  //~ last_sums_awaited
    }
    if constexpr (Config::sends) {
        if (is_sound) {
            const PhaseSpan<Config> span(args, SplitPhase::copy_and_put);
            if constexpr (Config::fetches_rows) {
                arrivals.come(active, half);
            } else {
                send_rows(args, ranks, active, shared_memory, half, counts, sent);
                sent.arrive_in_combine(ranks, half);
            }
        }
    }
    if constexpr (Config::receives) {
        const WaitCost cost(args.wait_cycles);
        const auto find_row = [&](uint32_t token_idx) {
            return sent_row(args, ranks, active, half, token_idx);
        };
        SlotReduction<Config, decltype(find_row)> reduction(args.out, args.num_tokens, find_row);
        {
            const PhaseSpan<Config> span(args, SplitPhase::recv_wait);
            if constexpr (!Config::fetches_rows) reduction.begin();
            is_sound = is_sound && arrivals.await_rows(args, active, half, cost,
                                                       waiter);  //~ contributions_awaited
        }
        const PhaseSpan<Config> span(args, SplitPhase::topk_reduce);
        if (is_sound) {
            // The places to fetch rows from arrive with the arrivals.
            if constexpr (Config::fetches_rows) reduction.begin();
            reduction.run();
        }
    }
    if (waiter.aborted() && threadIdx.x == 0) stop_later_kernels(local);
    last_anchor<Config>(args);
}

}  // namespace deep_moe
