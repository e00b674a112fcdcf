// Copies of 16 bytes per thread from global to shared memory that threads need not wait for. They
// write in the generic proxy. Any thread may call these.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// num_bytes, at most 16, from `src`, then zeros up to 16 bytes. Both addresses are multiples of 16;
// nothing is read where num_bytes is 0.
__device__ __forceinline__ void cp_async_cg_shared_global(uint32_t dst, const void* src,
                                                          uint32_t num_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(dst), "l"(src), "r"(num_bytes)
                 : "memory");
}

// Until all of this thread's copies are complete.
__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;" : : : "memory");
}

}  // namespace deep_moe::ptx
