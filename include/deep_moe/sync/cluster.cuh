// Threads of a cluster wait for one another.
#pragma once

#include "deep_moe/ptx/cluster.cuh"

namespace deep_moe {

// All threads of the cluster: what any wrote before, all see behind it.
__device__ __forceinline__ void sync_cluster() {
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

}  // namespace deep_moe
