// The SM100 kernel: shared memory, initialization, and which warp does what. Everything else has a
// file of its own.
//
// Grid: num_sms CTAs, one per SM, all resident at once, in clusters of two. The even CTA of a pair
// issues the MMAs of both.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm100/activation_loader.cuh"
#include "deep_moe/experts/sm100/epilogue.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/mma.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/experts/sm100/weight_decoder.cuh"
#include "deep_moe/experts/sm100/weight_loader.cuh"
#include "deep_moe/formats/equal_scale_bytes.cuh"
#include "deep_moe/kernels/registers.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/layout/token_places.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/tcgen05.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/handover.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm100 {

// The role table. A warpgroup (four warps) shares one register budget.
//
//   warps                 role                 registers per thread
//   0 .. 3                dispatch             num_dispatch_registers
//   4, 5, 6, 7            activation loader, weight loader, MMA, idle
//                                              num_loader_registers
//   num_decode_warps      decode weights       num_decode_registers
//   num_epilogue_warps    epilogue, combine    num_epilogue_registers
//
// Where tokens come from, and what comes behind the epilogues, Config::Tokens says (tokens/).
template <class Config>
struct WarpRoles {
    static constexpr uint32_t activation_loader = Config::num_dispatch_warps;
    static constexpr uint32_t weight_loader = activation_loader + 1;
    static constexpr uint32_t mma = activation_loader + 2;
    static constexpr uint32_t first_decode = activation_loader + 4;
    static constexpr uint32_t first_epilogue = first_decode + Config::num_decode_warps;
    static_assert(Config::num_dispatch_warps == 4, "dispatch is one warpgroup");
    static_assert(Config::num_threads == (first_epilogue + Config::num_epilogue_warps) * warp_size,
                  "num_threads is dispatch + 4 + decode + epilogue warps");
    static_assert(Config::num_decode_warps == (Config::Weights::is_decoded ? num_decode_warps : 0),
                  "warps decode weights where these are decoded");
    static_assert((Config::num_dispatch_registers + Config::num_loader_registers) * 128 +
                          Config::num_decode_registers * Config::num_decode_warps * warp_size +
                          Config::num_epilogue_registers * Config::num_epilogue_warps * warp_size <=
                      min(max_registers_per_cta, launch_registers<Config>* Config::num_threads),
                  "register budgets must fit into what a CTA is launched with");
};

// Barriers, tensor memory, descriptors. Ends when both CTAs are ready; returns the TMEM address.
template <class Config>
__device__ uint32_t initialize(const KernelArgs& args, const SharedMemory<Config>& smem,
                               const uint32_t* tmem_ptr, uint32_t warp_idx) {
    using Roles = WarpRoles<Config>;
    constexpr bool has_scales = Config::Weights::has_scales;
    constexpr bool loads_all_scales = has_scales && !Config::Weights::has_unit_scales;
    if (warp_idx == 0 && ptx::elect_sync()) smem.init_barriers();
    if (warp_idx == Roles::mma) {
        ptx::tcgen05_alloc_cta_group2(smem.tmem_ptr(), Config::num_tmem_columns);
        ptx::tcgen05_relinquish_alloc_permit_cta_group2();
    }
    if (warp_idx == Roles::activation_loader && ptx::elect_sync()) {
        for (const TensorMap& map : args.l1_activations) ptx::prefetch_tensormap(&map);
        if constexpr (loads_all_scales) ptx::prefetch_tensormap(&args.l1_activation_sf);
        for (const TensorMap& map : args.l2_activations) ptx::prefetch_tensormap(&map);
        if constexpr (has_scales) ptx::prefetch_tensormap(&args.l2_activation_sf);
    }
    if (warp_idx == Roles::weight_loader && ptx::elect_sync()) {
        ptx::prefetch_tensormap(&args.l1_weights);
        if constexpr (loads_all_scales) ptx::prefetch_tensormap(&args.l1_weight_sf);
        ptx::prefetch_tensormap(&args.l2_weights);
        if constexpr (loads_all_scales) ptx::prefetch_tensormap(&args.l2_weight_sf);
    }
    if constexpr (Config::Weights::has_unit_scales) {
        if (warp_idx == Roles::weight_loader) {
            constexpr uint32_t ones = 127 * same_four_bytes;  // UE8M0
            for (uint32_t i = ptx::lane_idx(); i < Config::block_n; i += warp_size) {
                ptx::st_shared_u32(smem.weight_sf(0) + i * sizeof(uint32_t), ones);
            }
            ptx::fence_proxy_async_shared_cta();  //~ unit_scales_fence
        }
    }
    if (warp_idx == Roles::first_epilogue && ptx::elect_sync()) {
        ptx::prefetch_tensormap(&args.l1_output);
    }
    __syncwarp();
    ptx::barrier_cluster_arrive();  //~ cluster_arrive
    ptx::barrier_cluster_wait();    //~ cluster_wait
    return *tmem_ptr;
}

template <class Config>
__device__ __forceinline__ void mega_moe(const KernelArgs& args) {
    using Roles = WarpRoles<Config>;
    static_assert(Config::cluster_size == 2 && Config::num_sms % 2 == 0,
                  "cluster_size must be 2 and num_sms even: two CTAs share each MMA");
    static_assert(Config::hidden % 128 == 0 && Config::intermediate_hidden % 128 == 0,
                  "hidden and intermediate_hidden must be multiples of 128");
    // The 128-byte swizzle repeats every 1024 bytes; Config::Smem's offsets start from here.
    extern __shared__ __align__(1024) uint8_t shared_bytes[];

    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    const SharedMemory<Config> smem(shared_memory);
    const uint32_t warp_idx = ptx::warp_idx();
    const uint32_t tmem = initialize(
        args, smem, reinterpret_cast<uint32_t*>(shared_bytes + Config::Smem::tmem_ptr_offset),
        warp_idx);

    if (warp_idx < Roles::activation_loader) {
        set_registers<Config, Config::num_dispatch_registers>();
        Config::Tokens::template bring<Config>(args, shared_memory, [](const auto&...) {});
    } else if (warp_idx < Roles::first_decode) {
        set_registers<Config, Config::num_loader_registers>();
        const SymmBuffer<Config> local = RankBuffers<Config>(args).local();
        Waiter waiter(args);
        if (warp_idx == Roles::activation_loader) {
            load_activations(args, smem, local, waiter);
        } else if (warp_idx == Roles::weight_loader) {
            load_weights(args, smem, local, waiter);
        } else if (warp_idx == Roles::mma && ptx::cluster_ctarank() == 0) {
            issue_mmas(args, smem, local, tmem, waiter);
        }
        sync_compute_done<Config>(waiter);
    } else if (warp_idx < Roles::first_epilogue) {
        if constexpr (Config::Weights::is_decoded) {
            set_registers<Config, Config::num_decode_registers>();
            Waiter waiter(args);
            decode_weights(args, smem, RankBuffers<Config>(args).local(),
                           warp_idx - Roles::first_decode, tmem, waiter);
            sync_compute_done<Config>(waiter);
        }
    } else {
        set_registers<Config, Config::num_epilogue_registers>();
        const TokenPlaces<Config> places(args);
        const uint32_t epilogue_warp_idx = warp_idx - Roles::first_epilogue;
        Waiter waiter(args);
        run_epilogues(args, smem, places, epilogue_warp_idx, tmem, waiter);
        sync_compute_done<Config>(waiter);
        Config::Tokens::template finish<Config>(args, shared_memory, epilogue_warp_idx, waiter);
    }

    // A CTA must not exit, nor free its tensor memory, while its peer may still reach into it.
    // After an abort nothing is in flight either: whoever gave up had waited for far longer than a
    // copy or an MMA takes.
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    // Read again, because keeping it would take a register from every role.
    if (ptx::tid_x() / warp_size == Roles::mma) {
        ptx::tcgen05_dealloc_cta_group2(tmem, Config::num_tmem_columns);  //~ tmem_freed
    }
}

}  // namespace deep_moe::sm100
