// All threads of a CTA meet, or those of its first warps.
#pragma once

#include <cuda/std/cstdint>

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

// The same of all threads, as an argument.
template <class Config>
struct WholeCta {
    static constexpr uint32_t num_threads = Config::num_threads;
    __device__ void sync() const { cta_sync<Config>(); }
    __device__ bool agrees(Waiter& waiter) const { return cta_agrees<Config>(waiter); }
};

// And of the first `num_threads` of them.
struct FirstWarps {
    NamedBarrier barrier;
    uint32_t num_threads;
    __device__ void sync() const { ptx::bar_sync(barrier, num_threads); }
    __device__ bool agrees(Waiter& waiter) const {
        return waiter.follow(ptx::bar_red_and(barrier, num_threads, !waiter.aborted()));
    }
};

}  // namespace deep_moe
