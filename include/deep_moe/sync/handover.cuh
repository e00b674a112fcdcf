// How the roles of a CTA meet between computing and combining. Both meetings vote: if one warp has
// given up, all of them know afterwards, and none goes on to tell other ranks that all is well.
#pragma once

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/sync/named_barriers.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// Every warp of the CTA exactly once, all lanes, when it will touch neither the counts, the pools
// nor the tiles in shared memory any more; also after an abort, also the idle warp. Its remote
// stores are covered by the barriers that the dispatch warps go through next.
//
// The fence is for combine, whose bulk copies overwrite shared memory that this warp has read and
// written with ordinary instructions.
template <class Config>
__device__ __forceinline__ bool sync_compute_done(Waiter& waiter) {
    ptx::fence_proxy_async_shared_cta();  //~ handover_fence
    return waiter.follow(
        ptx::bar_red_and(NamedBarrier::compute_done, Config::num_threads, !waiter.aborted()));
}

// Dispatch warps after the rank barrier before combine, epilogue warps (SM90: math warps) when they
// are ready for it: every contribution has arrived. Exactly once.
template <class Config>
__device__ __forceinline__ bool sync_combine_ready(Waiter& waiter) {
    constexpr uint32_t num_threads =
        (Config::num_dispatch_warps + Config::num_epilogue_warps) * warp_size;
    return waiter.follow(
        ptx::bar_red_and(NamedBarrier::combine_ready, num_threads, !waiter.aborted()));
}

}  // namespace deep_moe
