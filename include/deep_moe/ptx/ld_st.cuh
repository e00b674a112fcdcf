// Loads and stores with an explicit scope and order, and vector accesses to shared memory.
//
// Scopes: gpu between CTAs of one device, sys between ranks and with the host. Any thread may call
// any of these.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// The 32-bit shared-window address that all shared-memory instructions here take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_relaxed_gpu(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_acquire_gpu(const uint64_t* address) {
    uint64_t value;
    //~ ld_acquire
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ int32_t ld_acquire_sys(const int32_t* address) {
    int32_t value;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_relaxed_gpu(uint32_t* address, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(uint32_t* address, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(int32_t* address, int32_t value) {
    asm volatile("st.relaxed.sys.global.s32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(uint64_t* address, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t address) {
    uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_u16(uint32_t address, uint16_t value) {
    asm volatile("st.shared.u16 [%0], %1;" : : "r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void st_shared_u32(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
    return __uint_as_float(ld_shared_u32(address));
}

__device__ __forceinline__ uint2 ld_shared_v2(uint32_t address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_v2(uint32_t address, uint2 value) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
                 :
                 : "r"(address), "r"(value.x), "r"(value.y)
                 : "memory");
}

__device__ __forceinline__ float2 ld_shared_f32x2(uint32_t address) {
    const uint2 words = ld_shared_v2(address);
    return {__uint_as_float(words.x), __uint_as_float(words.y)};
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

}  // namespace deep_moe::ptx
