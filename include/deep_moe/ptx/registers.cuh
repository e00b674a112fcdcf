// Moving registers between warpgroups, and keeping values in them. For the former all four warps of
// a warpgroup execute the same one; `count` is a multiple of 8 in 24..256.
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

// The same value, which the compiler does not know any more. Any thread. By a sum, because an OR
// would be made part of each logical instruction that uses the value.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
    uint32_t unknown;
    asm("{\n"
        ".reg .b32 zero;\n"
        "mov.u32 zero, %laneid;\n"
        "popc.b32 zero, zero;\n"
        "shr.b32 zero, zero, 6;\n"
        "add.u32 %0, %1, zero;\n"
        "}"
        : "=r"(unknown)
        : "r"(value));
    return unknown;
}

}  // namespace deep_moe::ptx
