// One-dimensional bulk copies. Size and both addresses are multiples of 16 bytes. Issued by one
// thread; bulk groups belong to that thread, so the same thread commits and waits.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Global memory (any rank's) to the own CTA's shared memory; counts `num_bytes` on `barrier`.
__device__ __forceinline__ void cp_async_bulk_shared_global(uint32_t dst, const void* src,
                                                            uint32_t num_bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(dst), "l"(src), "r"(num_bytes), "r"(barrier)
        : "memory");
}

// A cache policy, as createpolicy makes it: L2 gives the bytes up first.
inline constexpr uint64_t evict_first = 0x12f0000000000000;

// The same for bytes that nobody will read again.
__device__ __forceinline__ void cp_async_bulk_shared_global_evict_first(uint32_t dst,
                                                                        const void* src,
                                                                        uint32_t num_bytes,
                                                                        uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;"
        :
        : "r"(dst), "l"(src), "r"(num_bytes), "r"(barrier), "l"(evict_first)
        : "memory");
}

// To the same offset in the CTAs of the cluster whose ranks are bits of `cta_mask`; in each of them
// the barrier at that of `barrier` counts `num_bytes`. SM90.
__device__ __forceinline__ void cp_async_bulk_shared_global_multicast(uint32_t dst, const void* src,
                                                                      uint32_t num_bytes,
                                                                      uint32_t barrier,
                                                                      uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], %2, [%3], %4;"
        :
        : "r"(dst), "l"(src), "r"(num_bytes), "r"(barrier), "h"(cta_mask)
        : "memory");
}

// The same for bytes that nobody will read again.
__device__ __forceinline__ void cp_async_bulk_shared_global_multicast_evict_first(
    uint32_t dst, const void* src, uint32_t num_bytes, uint32_t barrier, uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1], %2, [%3], %4, %5;"
        :
        : "r"(dst), "l"(src), "r"(num_bytes), "r"(barrier), "h"(cta_mask), "l"(evict_first)
        : "memory");
}

// Global memory to L2. A hint: nobody can wait for it, and it may be dropped.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* src, uint32_t num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(src), "r"(num_bytes));
}

// Own shared memory to global memory, part of the thread's open bulk group.
__device__ __forceinline__ void cp_async_bulk_global_shared(void* dst, uint32_t src,
                                                            uint32_t num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(dst), "r"(src), "r"(num_bytes)
                 : "memory");
}

// The same, added to what is there: BF16 or float32 values, each rounded once. Global memory does
// the additions, so no thread reads the destination. float32 results below 2^-126 become zero.
__device__ __forceinline__ void cp_reduce_async_bulk_add_bf16(void* dst, uint32_t src,
                                                              uint32_t num_bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;"
                 :
                 : "l"(dst), "r"(src), "r"(num_bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(void* dst, uint32_t src,
                                                             uint32_t num_bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(dst), "r"(src), "r"(num_bytes)
                 : "memory");
}

// Closes the thread's open bulk group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Until at most `num_pending` newest groups are incomplete: their bytes are written and visible to
// this thread, which may then publish them.
template <uint32_t num_pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(num_pending) : "memory");
}

// Until at most `num_pending` newest groups still read their source: shared memory may be written
// again, but the destination may not be complete.
template <uint32_t num_pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(num_pending) : "memory");
}

}  // namespace deep_moe::ptx
