// Atomic updates, named after instruction, order and scope. Two atomics on one word are atomic to
// each other only if both scopes reach both threads: sys as soon as another rank takes part.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

__device__ __forceinline__ uint32_t atom_add_acq_rel_gpu(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(value)
                 : "memory");  //~ atom_add_acq_rel
    return old;
}

// One more, up to 2^31 - 1. An addition of one would be slower: ptxas puts the additions of a
// warp's lanes together and shares out the sum at once, so it waits for it, while here a thread
// goes on until it needs what is returned.
__device__ __forceinline__ uint32_t atom_inc_relaxed_gpu(uint32_t* address) {
    uint32_t old;
    asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(0x7fffffff)
                 : "memory");
    return old;
}

__device__ __forceinline__ uint32_t atom_add_relaxed_gpu(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(value)
                 : "memory");
    return old;
}

__device__ __forceinline__ uint64_t atom_add_relaxed_gpu(uint64_t* address, uint64_t value) {
    uint64_t old;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(address), "l"(value)
                 : "memory");
    return old;
}

__device__ __forceinline__ uint32_t atom_cas_relaxed_sys(uint32_t* address, uint32_t compare,
                                                         uint32_t value) {
    uint32_t old;
    asm volatile("atom.cas.relaxed.sys.global.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(address), "r"(compare), "r"(value)
                 : "memory");
    return old;
}

__device__ __forceinline__ void red_add_relaxed_gpu(int32_t* address, int32_t value) {
    asm volatile("red.add.relaxed.gpu.global.s32 [%0], %1;"
                 :
                 : "l"(address), "r"(value)
                 : "memory");
}

__device__ __forceinline__ void red_add_relaxed_gpu(uint32_t* address, uint32_t value) {
    asm volatile("red.add.relaxed.gpu.global.u32 [%0], %1;"
                 :
                 : "l"(address), "r"(value)
                 : "memory");
}

__device__ __forceinline__ void red_add_relaxed_sys(uint64_t* address, uint64_t value) {
    asm volatile("red.add.relaxed.sys.global.u64 [%0], %1;"
                 :
                 : "l"(address), "l"(value)
                 : "memory");
}

__device__ __forceinline__ void red_add_release_gpu(uint32_t* address, uint32_t value) {
    asm volatile("red.add.release.gpu.global.u32 [%0], %1;"
                 :
                 : "l"(address), "r"(value)
                 : "memory");
}

__device__ __forceinline__ void red_add_release_sys(int32_t* address, int32_t value) {
    asm volatile("red.add.release.sys.global.s32 [%0], %1;"
                 :
                 : "l"(address), "r"(value)
                 : "memory");
}

__device__ __forceinline__ void red_or_relaxed_gpu(uint32_t* address, uint32_t bits) {
    asm volatile("red.or.relaxed.gpu.global.b32 [%0], %1;" : : "l"(address), "r"(bits) : "memory");
}

__device__ __forceinline__ void red_or_relaxed_sys(uint64_t* address, uint64_t bits) {
    asm volatile("red.or.relaxed.sys.global.b64 [%0], %1;" : : "l"(address), "l"(bits) : "memory");
}

__device__ __forceinline__ void red_or_release_gpu(uint64_t* address, uint64_t bits) {
    //~ red_or_release
    asm volatile("red.or.release.gpu.global.b64 [%0], %1;" : : "l"(address), "l"(bits) : "memory");
}

// Shared-memory counter of the own CTA; returns the value before the addition.
__device__ __forceinline__ uint32_t atom_add_shared(uint32_t address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.add.relaxed.cta.shared::cta.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "r"(address), "r"(value)
                 : "memory");
    return old;
}

__device__ __forceinline__ void red_add_shared(uint32_t address, uint32_t value) {
    asm volatile("red.add.relaxed.cta.shared::cta.u32 [%0], %1;"
                 :
                 : "r"(address), "r"(value)
                 : "memory");
}

__device__ __forceinline__ void red_max_shared(uint32_t address, uint32_t value) {
    asm volatile("red.max.relaxed.cta.shared::cta.u32 [%0], %1;"
                 :
                 : "r"(address), "r"(value)
                 : "memory");
}

}  // namespace deep_moe::ptx
