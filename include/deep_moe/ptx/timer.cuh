// Time, for the limits of waits and for traces.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Nanoseconds; the same clock on all SMs. Its resolution differs by device (32 ns to 1 us).
__device__ __forceinline__ uint64_t globaltimer() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// Cycles of this SM, which no other SM shares.
__device__ __forceinline__ uint64_t clock64() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now) : : "memory");
    return now;
}

// The lower half of `clock64`.
__device__ __forceinline__ uint32_t clock() {
    uint32_t now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now) : : "memory");
    return now;
}

// The SM that the thread runs on.
__device__ __forceinline__ uint32_t smid() {
    uint32_t idx;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(idx));
    return idx;
}

// Suspends the thread for roughly `nanoseconds`, at most twice that.
__device__ __forceinline__ void nanosleep(uint32_t nanoseconds) {
    asm volatile("nanosleep.u32 %0;" : : "r"(nanoseconds) : "memory");
}

}  // namespace deep_moe::ptx
