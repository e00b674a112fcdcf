// Slots of a call by segments, one per CTA; within a segment each warp has a part, 32 slots per
// round. So the order of slots is the order of segments, warps, rounds and lanes.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/training/args.cuh"

namespace deep_moe {

inline constexpr uint32_t no_expert = 0xffffffff;

template <class Config>
struct Segment {
    static constexpr uint32_t num_warps = Config::num_threads / warp_size;
    static constexpr uint32_t slots_per_warp = Config::num_rounds * warp_size;

    // Of this lane in a round.
    static __device__ __forceinline__ uint32_t slot_idx(uint32_t round) {
        return (blockIdx.x * num_warps + ptx::warp_idx()) * slots_per_warp + round * warp_size +
               ptx::lane_idx();
    }

    static __device__ __forceinline__ uint32_t expert_of_slot(const RouteSlotsArgs& args,
                                                              uint32_t slot_idx) {
        if (slot_idx >= args.num_slots) return no_expert;
        const int64_t expert = load_topk_idx<Config>(args.topk_idx, slot_idx);
        return is_routed<Config>(expert) ? static_cast<uint32_t>(expert) : no_expert;
    }
};

// Lanes with the same expert as this one, by the bits of its number. All 32 lanes.
template <class Config>
__device__ __forceinline__ uint32_t lanes_of_same_expert(uint32_t expert) {
    uint32_t lanes = __ballot_sync(full_warp, expert != no_expert);
#pragma unroll
    for (uint32_t bit = 1; bit < Config::num_experts; bit *= 2) {
        const uint32_t with_bit = __ballot_sync(full_warp, (expert & bit) != 0);
        lanes &= (expert & bit) != 0 ? with_bit : ~with_bit;
    }
    return expert == no_expert ? 0 : lanes;
}

}  // namespace deep_moe
