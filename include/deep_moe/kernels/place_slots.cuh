// Sorting slots by expert, last step: write the row of each slot, in the order of slots, and the
// slot of each row. No atomic decides an order, so the result is the same in every run.
//
// Grid: a CTA per segment.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/training/segment.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void place_slots(const RouteSlotsArgs& args) {
    using Part = Segment<Config>;
    __shared__ uint32_t next_row[Part::num_warps][Config::num_experts];
    uint32_t* const own_next_row = next_row[ptx::warp_idx()];
    for (uint32_t i = threadIdx.x; i < Part::num_warps * Config::num_experts;
         i += Config::num_threads) {
        next_row[i / Config::num_experts][i % Config::num_experts] = 0;
    }
    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);  //~ counts_of_warps_cleared

    // How many each warp has of each expert. Only its own lanes touch a warp's counts.
    uint32_t experts[Config::num_rounds];
    uint32_t lanes[Config::num_rounds];
#pragma unroll
    for (uint32_t round = 0; round < Config::num_rounds; ++round) {
        experts[round] = Part::expert_of_slot(args, Part::slot_idx(round));
        lanes[round] = lanes_of_same_expert<Config>(experts[round]);
        const uint32_t expert = experts[round];
        const bool is_first = __ffs(lanes[round]) - 1 == static_cast<int>(ptx::lane_idx());
        if (is_first) own_next_row[expert] += __popc(lanes[round]);
        __syncwarp();  //~ round_counted
    }
    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);  //~ slots_of_warps_counted

    // Counts become each warp's first row.
    for (uint32_t expert = threadIdx.x; expert < Config::num_experts;
         expert += Config::num_threads) {
        const int32_t begin = expert == 0 ? 0 : args.offs[expert - 1];
        uint32_t row = begin + args.segment_counts[blockIdx.x * Config::num_experts + expert];
        for (uint32_t warp = 0; warp < Part::num_warps; ++warp) {
            const uint32_t count = next_row[warp][expert];
            next_row[warp][expert] = row;
            row += count;
        }
    }
    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);  //~ first_rows_known

#pragma unroll
    for (uint32_t round = 0; round < Config::num_rounds; ++round) {
        const uint32_t slot_idx = Part::slot_idx(round);
        const uint32_t before = lanes[round] & ((1u << ptx::lane_idx()) - 1);
        if (experts[round] != no_expert) {
            const uint32_t row = own_next_row[experts[round]] + __popc(before);  //~ rank_of_slot
            args.row_of_slot[slot_idx] = static_cast<int32_t>(row);
            args.slot_of_row[row] = static_cast<int32_t>(slot_idx);
        } else if (slot_idx < args.num_slots) {
            args.row_of_slot[slot_idx] = -1;  //~ slot_without_row
        }
        __syncwarp();  //~ rows_of_round_read
        if (lanes[round] != 0 && before == 0) {
            own_next_row[experts[round]] += __popc(lanes[round]);
        }
        __syncwarp();  //~ rows_of_round_taken
    }
}

}  // namespace deep_moe
