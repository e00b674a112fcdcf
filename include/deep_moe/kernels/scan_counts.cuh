// Sorting slots by expert, second step: find where each expert's rows end, and where each segment
// begins in them.
//
// Grid: one CTA, a thread per expert.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/training/args.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void scan_counts(const RouteSlotsArgs& args) {
    static_assert(Config::num_threads % warp_size == 0 &&
                  Config::num_threads >= Config::num_experts);
    constexpr uint32_t num_warps = Config::num_threads / warp_size;
    constexpr uint32_t loads_at_once = 8;
    __shared__ uint32_t rows_of_warp[num_warps];
    const uint32_t warp_idx = ptx::warp_idx();
    const uint32_t expert = threadIdx.x;
    uint32_t num_slots = 0;
    if (expert < Config::num_experts) {
        for (uint32_t first = 0; first < args.num_segments; first += loads_at_once) {
            int32_t* const counts =
                args.segment_counts + uint64_t{first} * Config::num_experts + expert;
            uint32_t loaded[loads_at_once];
#pragma unroll
            for (uint32_t i = 0; i < loads_at_once; ++i) {
                const bool exists = first + i < args.num_segments;
                loaded[i] = exists ? static_cast<uint32_t>(counts[i * Config::num_experts]) : 0;
            }
#pragma unroll
            for (uint32_t i = 0; i < loads_at_once; ++i) {
                if (first + i < args.num_segments) {
                    counts[i * Config::num_experts] =
                        static_cast<int32_t>(num_slots);  //~ earlier_segments_summed
                }
                num_slots += loaded[i];
            }
        }
    }
    const uint32_t in_warp =
        ptx::inclusive_sum(align_up(num_slots, Config::alignment));  //~ rows_aligned
    if (ptx::lane_idx() == warp_size - 1) rows_of_warp[warp_idx] = in_warp;
    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);  //~ rows_of_warps_known
    uint32_t end = in_warp;
    for (uint32_t i = 0; i < warp_idx; ++i) end += rows_of_warp[i];
    if (expert < Config::num_experts) args.offs[expert] = static_cast<int32_t>(end);
}

}  // namespace deep_moe
