// Throughput combine: the tokens' ranks add the experts' rows. With `sends_rows` they are sent
// there; otherwise the experts have written them into the symmetric buffer, and they are fetched.
//
// Grid: as dispatch's.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/claims.cuh"
#include "deep_moe/split/parts.cuh"
#include "deep_moe/split/phase_span.cuh"
#include "deep_moe/split/reduce_slots.cuh"
#include "deep_moe/split/return_rows.cuh"
#include "deep_moe/split/step.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/throughput_warps.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// Warps of a CTA that claim pieces of its tokens, wait for their rows and add them.
template <class Config>
__device__ void combine_fetch(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                              const Step<Config>& step, const Claims& claims, Waiter& waiter) {
    constexpr uint32_t num_pieces = SlotSum<Config>::num_pieces;
    const PieceBlock<Config> block(args.num_tokens);
    const auto parts_of = [&](uint32_t) { return PieceParts(block.size()); };
    PartWait<Config, Step<Config>, decltype(parts_of)> wait(step, parts_of, waiter);
    SlotRow next_slot = {0, 0.0f};
    const auto claim = [&] {
        const uint32_t i = claims.next();
        if (i < block.size()) {
            next_slot = returned_row(args, ranks, (block.begin + i) / num_pieces);
        }
        return i;
    };
    uint32_t i = claim();
    {
        const PhaseSpan<Config> span(args, SplitPhase::recv_wait);
        wait.reach(0);
    }
    const PhaseSpan<Config> span(args, SplitPhase::topk_reduce);
    while (i < block.size() && wait.reach(i)) {  //~ piece_awaited
        const uint32_t piece = block.begin + i;
        const SlotRow slot = next_slot;
        i = claim();  // the next one is looked up while the rows of this one are on their way
        SlotSum<Config>::add(args.out, piece / num_pieces, piece % num_pieces, slot);
    }
    wait.reach_end();
}

// The warps that send, while others add: all parts but the first.
template <class Config>
__device__ void combine_share_rest(const RowSharing<Config>& sharing, const Step<Config>& step) {
    const uint32_t warp = ptx::warp_idx() - fetching_warps<Config>;
    const uint32_t num_parts = sharing.num_parts();
    for (uint32_t part = 1; part < num_parts; ++part) {
        sharing.share(part, warp, sharing_warps<Config>);
        step.tell_all(warp, [&](uint32_t rank_idx) { return sharing.units(rank_idx, part); });
    }
}

template <class Config>
__device__ __forceinline__ void throughput_combine(const ThroughputArgs& args) {
    static_assert(Config::num_threads % warp_size == 0);
    extern __shared__ __align__(16) uint8_t shared_bytes[];
    const ThroughputRanks<Config> ranks(args);
    Waiter waiter(args);
    first_anchor<Config>(args);
    const Claims claims(ptx::shared_address(shared_bytes) + Config::Smem::claims_offset);
    if (threadIdx.x == 0) claims.clear();
    Step<Config> step(ranks, StepKind::rows, Config::sends_rows ? 0 : fetched_mark);
    if (step.begin(waiter)) {
        if constexpr (Config::sends_rows) {
            const RowSharing<Config> sharing(args, ranks);
            {
                const PhaseSpan<Config> span(args, SplitPhase::copy_and_put);
                sharing.share(0, ptx::warp_idx(), Config::num_threads / warp_size);
                step.arrive([&](uint32_t rank_idx) { return sharing.units(rank_idx, 0); });
            }
            step.count_on(waiter);
            if (ptx::warp_idx() >= fetching_warps<Config>) combine_share_rest(sharing, step);
        } else {
            const PhaseSpan<Config> span(args, SplitPhase::copy_and_put);
            step.arrive();
            step.count_on(waiter);
        }
        combine_fetch(args, ranks, step, claims, waiter);
    }
    step.end(waiter);
    last_anchor<Config>(args);
}

}  // namespace deep_moe
