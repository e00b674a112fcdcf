// The 16 hardware barriers of a CTA. Whole converged warps; `num_threads` counts everyone who takes
// part, arriving or waiting, and is a multiple of 32.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/sync/named_barriers.cuh"

namespace deep_moe::ptx {

// Arrives and waits for all others. `offset` selects a barrier of a family (first_...).
__device__ __forceinline__ void bar_sync(NamedBarrier barrier, uint32_t num_threads,
                                         uint32_t offset = 0) {
    asm volatile("bar.sync %0, %1;"
                 :
                 : "r"(static_cast<uint32_t>(barrier) + offset), "r"(num_threads)
                 : "memory");
}

// Arrives, waits for all others, and tells everyone whether `value` was true in every thread.
__device__ __forceinline__ bool bar_red_and(NamedBarrier barrier, uint32_t num_threads, bool value,
                                            uint32_t offset = 0) {
    uint32_t all;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "bar.red.and.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}"
        : "=r"(all)
        : "r"(static_cast<uint32_t>(barrier) + offset), "r"(num_threads),
          "r"(static_cast<uint32_t>(value))
        : "memory");
    return all != 0;
}

// A barrier of one warp, which is converged: what it gives is that ptxas knows that. Behind a wait
// of single lanes it does not, vote or __syncwarp notwithstanding, and keeps loops that follow out
// of the uniform registers, from which tensor cores and tensor copies take their operands.
__device__ __forceinline__ void reconverge(NamedBarrier barrier) {
    bar_sync(barrier, warp_size);
}

}  // namespace deep_moe::ptx
