// Moves registers between warpgroups. All four warps of a warpgroup execute the same one; `count`
// is a multiple of 8 in 24..256.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Gives registers back. The warpgroup holds at least `count`.
template <uint32_t count>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(count));
}

// Takes registers, and waits until others have given back enough. The warpgroup holds at most
// `count`; the new registers are undefined.
template <uint32_t count>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(count));
}

}  // namespace deep_moe::ptx
