// Time, for the limits of waits.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Nanoseconds; the same clock on all SMs. Its resolution differs by device (32 ns to 1 us).
__device__ __forceinline__ uint64_t globaltimer() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// Suspends the thread for roughly `nanoseconds`, at most twice that.
__device__ __forceinline__ void nanosleep(uint32_t nanoseconds) {
    asm volatile("nanosleep.u32 %0;" : : "r"(nanoseconds) : "memory");
}

}  // namespace deep_moe::ptx
