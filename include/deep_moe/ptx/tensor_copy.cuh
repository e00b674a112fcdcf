// Tensor copies (TMA tiles) of two and three dimensions. Coordinates are elements, innermost first;
// what lies outside the tensor is loaded as zero and not stored, but always counted in full on the
// barrier. Issued by one thread; completion of stores is a bulk group (bulk_copy.cuh).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe::ptx {

// Brings the descriptor into the cache before its first use.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// To the own CTA's shared memory; `barrier` in the own CTA. SM90.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_global(uint32_t dst,
                                                                      const TensorMap* map,
                                                                      uint32_t barrier, int32_t x,
                                                                      int32_t y, int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];"
        :
        : "r"(dst), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// The same to this offset in the CTAs of the cluster whose ranks are bits of `cta_mask`; in each of
// them the barrier at that of `barrier` counts the bytes. SM90.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_global_multicast(
    uint32_t dst, const TensorMap* map, uint32_t barrier, int32_t x, int32_t y, int32_t z,
    uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;"
        :
        : "r"(dst), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(cta_mask)
        : "memory");
}

// To the own CTA's shared memory; `barrier` in the own CTA or in the other CTA of the pair. SM100.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_cta_group2_shared_global(
    uint32_t dst, const TensorMap* map, uint32_t barrier, int32_t x, int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :
        : "r"(dst), "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// From the own CTA's shared memory, part of the thread's open bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_global_shared(const TensorMap* map,
                                                                      uint32_t src, int32_t x,
                                                                      int32_t y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 :
                 : "l"(map), "r"(x), "r"(y), "r"(src)
                 : "memory");
}

}  // namespace deep_moe::ptx
