// Fences between threads, between the generic proxy (ordinary loads and stores) and the async proxy
// (bulk and tensor copies, MMAs that read shared memory), and after the initialization of
// mbarriers.
//
// Between proxies:
// A completion mechanism (mbarrier wait, wait_group) already orders a copy's bytes before the
// waiter's later accesses; a fence is needed in the other direction, executed by each thread whose
// generic accesses come first (or, for data of other CTAs, by the thread that issues the copy,
// between its acquire and the copy).
#pragma once

namespace deep_moe::ptx {

// Together with a relaxed write at sys scope behind it, by the same thread, a release: one for any
// number of such writes. It waits until the thread's own writes, remote ones too, have been done.
__device__ __forceinline__ void fence_release_sys() {
    asm volatile("fence.release.sys;" : : : "memory");  //~ fence_release
}

// Together with a relaxed read at sys scope in front of it, by the same thread, an acquire.
__device__ __forceinline__ void fence_acquire_sys() {
    asm volatile("fence.acquire.sys;" : : : "memory");  //~ fence_acquire
}

// Every state space.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" : : : "memory");
}

// Generic accesses to global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" : : : "memory");
}

// Generic accesses to the CTA's own shared memory.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// Makes initialized mbarriers visible to the cluster, together with a cluster barrier after it. The
// initializing thread.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

}  // namespace deep_moe::ptx
