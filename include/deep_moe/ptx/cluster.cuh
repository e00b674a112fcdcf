// The cluster of CTAs: barrier, ranks, and addresses in another CTA's shared memory.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of the cluster, each warp converged. Releases at cluster scope.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

// All threads of the cluster, each warp converged. Acquires at cluster scope.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// The address of the same variable in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t mapa_shared_cluster(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// The larger of a word in any CTA's shared memory and `value`, which `barrier` in the same CTA
// counts as 4 bytes: who waits for them there may read it. Both addresses as mapa_shared_cluster
// gives them. Relaxed at cluster scope.
__device__ __forceinline__ void red_async_max_u32(uint32_t address, uint32_t value,
                                                  uint32_t barrier) {
    asm volatile(
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.max.u32"
        " [%0], %1, [%2];"
        :
        : "r"(address), "r"(value), "r"(barrier)
        : "memory");
}

}  // namespace deep_moe::ptx
