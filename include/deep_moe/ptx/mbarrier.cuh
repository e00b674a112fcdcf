// mbarriers: 64-bit objects in shared memory that count arrivals and bytes. A phase ends when no
// arrival and no byte is outstanding; waiting names the parity of the phase (0 first), and a wait
// for the opposite parity of a fresh barrier succeeds at once.
//
// Addresses are 32-bit shared-window addresses (ptx::shared_address). Any thread may call these.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Own CTA. `num_arrivals` per phase.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(barrier), "r"(num_arrivals)
                 : "memory");
}

// Own CTA. Ends the object's life: nobody waits for it or arrives at it any more.
__device__ __forceinline__ void mbarrier_inval(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" : : "r"(barrier) : "memory");
}

// Own CTA; releases at CTA scope.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Any CTA of the cluster; releases at CTA scope, so it hands no data to another CTA. Asking for
// cluster scope would cost a membar over the whole device.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Own CTA; announces `num_bytes` of copies and arrives once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(barrier), "r"(num_bytes)
                 : "memory");
}

// Own CTA; announces `num_bytes` of copies. The phase waits for an arrival as before.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(barrier), "r"(num_bytes)
                 : "memory");
}

// Any CTA of the cluster; announces `num_bytes` of copies and arrives once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_shared_cluster(uint32_t barrier,
                                                                         uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;"
                 :
                 : "r"(barrier), "r"(num_bytes)
                 : "memory");
}

// True once the phase of this parity has ended; may suspend for a bounded time. Acquires at CTA
// scope. Own CTA.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// The same, but never suspends.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

}  // namespace deep_moe::ptx
