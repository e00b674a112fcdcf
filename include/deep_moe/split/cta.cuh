// All threads of a CTA meet.
#pragma once

#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/sync/named_barriers.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void cta_sync() {
    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);
}

// If one thread has given up, all of them know afterwards.
template <class Config>
__device__ __forceinline__ bool cta_agrees(Waiter& waiter) {
    return waiter.follow(
        ptx::bar_red_and(NamedBarrier::cta, Config::num_threads, !waiter.aborted()));
}

}  // namespace deep_moe
