// Throughput combine: the tokens' ranks fetch the experts' rows and add them. With `copies_rows`
// the rows are copied into the symmetric buffer first; otherwise the experts have written them
// there.
//
// Grid: as dispatch's.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/phase_span.cuh"
#include "deep_moe/split/reduce_slots.cuh"
#include "deep_moe/split/return_rows.cuh"
#include "deep_moe/split/step.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void throughput_combine(const ThroughputArgs& args) {
    static_assert(Config::num_threads % warp_size == 0);
    extern __shared__ __align__(16) uint8_t shared_bytes[];
    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    const ThroughputRanks<Config> ranks(args);
    Waiter waiter(args);
    first_anchor<Config>(args);
    Step<Config> step(ranks, StepKind::rows, waiter);
    const auto find_row = [&](uint32_t token_idx) { return returned_row(args, ranks, token_idx); };
    SlotReduction<Config, decltype(find_row)> reduction(args.out, args.num_tokens, find_row);
    bool is_sound = step.begin();
    if (is_sound) {
        const PhaseSpan<Config> span(args, SplitPhase::copy_and_put);
        if constexpr (Config::copies_rows) share_rows(args, ranks.local(), shared_memory);
        step.arrive();
        reduction.begin();
    }
    if (is_sound) {
        const PhaseSpan<Config> span(args, SplitPhase::recv_wait);
        is_sound = step.await();  //~ rows_of_all_awaited
    }
    if (is_sound) {
        const PhaseSpan<Config> span(args, SplitPhase::topk_reduce);
        step.count_on();
        reduction.run();
    }
    step.end();
    last_anchor<Config>(args);
}

}  // namespace deep_moe
