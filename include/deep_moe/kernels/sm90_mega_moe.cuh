// The SM90 kernel: shared memory, initialization, and which warp does what. Everything else has a
// file of its own.
//
// Grid: num_sms CTAs, one per SM, all resident at once, by themselves or in clusters of two, whose
// CTAs share copies of weights.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/activation_loader.cuh"
#include "deep_moe/experts/sm90/kernel_args.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/math_warps.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/experts/sm90/weight_loader.cuh"
#include "deep_moe/kernels/registers.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/cluster.cuh"
#include "deep_moe/sync/handover.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// The role table. A warpgroup (four warps) shares one register budget.
//
//   warps       role                                           registers per thread
//   0, 1        bring tokens: dispatch. With small tiles
//               warp 1 pulls none, and publishes blocks        num_dispatch_registers
//   2, 3        activation loader, weight loader               num_dispatch_registers
//   4 .. 11     math: products, epilogues, and combine         num_math_registers
//
// Where tokens come from, and what comes behind the epilogues, Config::Tokens says (tokens/).
template <class Config>
struct WarpRoles {
    static constexpr uint32_t activation_loader = Config::num_dispatch_warps;
    static constexpr uint32_t weight_loader = activation_loader + 1;
    static constexpr uint32_t first_math = activation_loader + 2;
    static_assert(Config::num_dispatch_warps == 2, "dispatch and the loaders are one warpgroup");
    static_assert(Config::num_threads == (first_math + num_math_warps<Config>)*warp_size,
                  "num_threads is dispatch + 2 + math warps");
    static_assert(Config::num_dispatch_registers * 128 +
                          num_math_registers<Config> * num_math_warps<Config> * warp_size <=
                      max_registers_per_cta,
                  "register budgets must fit into what an SM has");
};

// All threads of the cluster, last of all: a CTA must not exit while the other one may still reach
// into it. That would happen after an abort; else both have done their blocks when the ranks meet
// before combine.
__device__ __forceinline__ void leave_cluster() {
    sync_cluster();  //~ cluster_left
}

template <class Config>
__device__ __forceinline__ void mega_moe(const KernelArgs& args) {
    using Roles = WarpRoles<Config>;
    static_assert(
        Config::cluster_size == Config::num_cluster_m_blocks && Config::cluster_size <= 2 &&
            Config::num_sms % Config::cluster_size == 0,
        "cluster_size must be 1 or 2, whose CTAs have an m-block each, and divide num_sms");
    static_assert(Config::block_n == 256 && Config::Smem::activations_dim2 == 128,
                  "a weight block is 256 rows, a k-block 128 bytes of each token");
    static_assert(Config::hidden % 128 == 0 && Config::intermediate_hidden % 128 == 0,
                  "hidden and intermediate_hidden must be multiples of 128");
    // The 128-byte swizzle repeats every 1024 bytes; Config::Smem's offsets start from here.
    extern __shared__ __align__(1024) uint8_t shared_bytes[];

    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    const SharedMemory<Config> smem(shared_memory);
    const uint32_t warp_idx = ptx::warp_idx();
    if (warp_idx == 0 && ptx::elect_sync()) smem.init_barriers();
    if (warp_idx == Roles::activation_loader && ptx::elect_sync()) {
        ptx::prefetch_tensormap(&args.l1_activations);
        ptx::prefetch_tensormap(&args.l2_activations);
    }
    __syncwarp();
    if constexpr (Config::cluster_size == 1) {
        ptx::bar_sync(NamedBarrier::cta, Config::num_threads);  //~ set_up
    } else {
        sync_cluster();  //~ cluster_set_up
    }

    if (warp_idx < Roles::first_math) {
        set_registers<Config, Config::num_dispatch_registers>();  //~ loader_registers
        if (warp_idx < Roles::activation_loader) {                //~ role_split
            Config::Tokens::template bring<Config>(
                args, shared_memory, [&](const SymmBuffer<Config>& local, Waiter& waiter) {
                    if constexpr (!loader_publishes<Config>) publish_blocks(smem, local, waiter);
                });
        } else {
            const SymmBuffer<Config> local = RankBuffers<Config>(args).local();
            Waiter waiter(args);
            if (warp_idx == Roles::activation_loader) {
                load_activations(args, smem, local, waiter);
            } else {
                load_weights(args, smem, local, waiter);
            }
            sync_compute_done<Config>(waiter);
            if constexpr (Config::cluster_size > 1) {
                leave_cluster();
                // Then halves of weights may have come for a stage that this CTA's loader did not
                // get to, or not have come for one that it did.
                if (waiter.aborted() && warp_idx == Roles::weight_loader && ptx::elect_sync()) {
                    smem.end_cluster_barriers();
                }
            }
            return;
        }
    } else {
        set_registers<Config, num_math_registers<Config>>();  //~ math_registers
        Waiter waiter(args);
        MathWarps<Config>(args, smem, waiter).run();
        sync_compute_done<Config>(waiter);
        Config::Tokens::template finish<Config>(args, shared_memory, warp_idx - Roles::first_math,
                                                waiter);
    }
    if constexpr (Config::cluster_size > 1) leave_cluster();
}

}  // namespace deep_moe::sm90
