// Warp-level collectives and the thread's place in the grid. The collectives are called by all 32
// lanes of a converged warp.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"

namespace deep_moe::ptx {

__device__ __forceinline__ uint32_t lane_idx() {
    return threadIdx.x % warp_size;
}

// threadIdx.x, read where the call stands.
__device__ __forceinline__ uint32_t tid_x() {
    uint32_t idx;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(idx));
    return idx;
}

// The same value in all lanes, in a form the compiler can tell is uniform.
__device__ __forceinline__ uint32_t warp_idx() {
    return __shfl_sync(full_warp, threadIdx.x / warp_size, 0);
}

// A value that is the same in all lanes, in a form that the compiler can tell is, and does not make
// anew at each use.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
    return __shfl_sync(full_warp, value, 0);
}

// True in exactly one lane, always the same one.
__device__ __forceinline__ bool elect_sync() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected)
        :
        : "memory");
    return elected != 0;
}

__device__ __forceinline__ uint32_t redux_sync_add(uint32_t value) {
    uint32_t sum;
    asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
    return sum;
}

__device__ __forceinline__ uint32_t redux_sync_min(uint32_t value) {
    uint32_t smallest;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(smallest) : "r"(value));
    return smallest;
}

__device__ __forceinline__ uint32_t redux_sync_max(uint32_t value) {
    uint32_t largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}

// Of the values of all lanes up to this one.
__device__ __forceinline__ uint32_t inclusive_sum(uint32_t value) {
#pragma unroll
    for (uint32_t distance = 1; distance < warp_size; distance *= 2) {
        const uint32_t before = __shfl_up_sync(full_warp, value, distance);
        value += lane_idx() >= distance ? before : 0;
    }
    return value;
}

// Position of the n-th set bit, counted from 0. Needs at least n + 1 set bits.
__device__ __forceinline__ uint32_t fns(uint32_t bits, uint32_t n) {
    uint32_t position;
    asm volatile("fns.b32 %0, %1, 0, %2;" : "=r"(position) : "r"(bits), "r"(n + 1));
    return position;
}

}  // namespace deep_moe::ptx
