// Sorting slots by expert, first step: count how many slots of each segment name each expert. It
// also marks every row as without a slot, until place_slots sets it.
//
// Grid: a CTA per segment.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/training/segment.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void count_slots(const RouteSlotsArgs& args) {
    __shared__ uint32_t counts[Config::num_experts];
    for (uint32_t i = threadIdx.x; i < Config::num_experts; i += Config::num_threads) {
        counts[i] = 0;
    }
    for (uint32_t row = blockIdx.x * Config::num_threads + threadIdx.x; row < args.num_rows;
         row += args.num_segments * Config::num_threads) {
        args.slot_of_row[row] = -1;  //~ rows_begin_unused
    }
    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);  //~ segment_cleared
#pragma unroll
    for (uint32_t round = 0; round < Config::num_rounds; ++round) {
        const uint32_t slot_idx = Segment<Config>::slot_idx(round);
        const uint32_t expert = Segment<Config>::expert_of_slot(args, slot_idx);
        if (expert != no_expert) ptx::red_add_shared(ptx::shared_address(&counts[expert]), 1);
    }
    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);  //~ segment_counted
    int32_t* const own = args.segment_counts + uint64_t{blockIdx.x} * Config::num_experts;
    for (uint32_t i = threadIdx.x; i < Config::num_experts; i += Config::num_threads) {
        own[i] = static_cast<int32_t>(counts[i]);
    }
}

}  // namespace deep_moe
