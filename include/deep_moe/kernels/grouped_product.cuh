// y[rows of expert e] = x[rows of expert e] times weight[e] transposed, where both are E4M3: x with
// a scale for each row and 128 values along K, weights with one for each 128 x 128. SM90. With
// Config::sums_rows the sums go over the rows of each expert (products/args.cuh).
//
// Grid: any number of clusters, a CTA per SM; each cluster takes every num_clusters-th turn.
//
//   warps     role                          registers per thread
//   0 .. 7    math: products, sums, stores  num_math_registers
//   8         loader                        num_loader_registers
//   9 .. 11   factors out of scales         num_loader_registers
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/kernels/registers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/products/operand_stages.cuh"
#include "deep_moe/products/product_warps.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/cluster.cuh"

namespace deep_moe {

// All threads of the cluster.
template <class Config>
__device__ __forceinline__ void meet_products() {
    if constexpr (Config::cluster_size == 1) {
        __syncthreads();
    } else {
        sync_cluster();
    }
}

template <class Config>
__device__ __forceinline__ void grouped_product(const GroupedProductArgs& args) {
    constexpr uint32_t loader = Config::num_math_warps;
    static_assert(Config::num_scale_warps == 3, "with the loader a warpgroup");
    static_assert(Config::num_threads == (loader + 1 + Config::num_scale_warps) * warp_size,
                  "num_threads is the math warps, the loader and the scales' warps");
    static_assert(Config::num_loader_registers * 128 +
                          Config::num_math_registers * Config::num_math_warps * warp_size <=
                      max_registers_per_cta,
                  "register budgets must fit into what an SM has");
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const OperandStages<Config> stages(ptx::shared_address(shared_bytes));
    const uint32_t warp_idx = ptx::warp_idx();
    if (warp_idx == loader && ptx::elect_sync()) {
        stages.init_barriers();
        ptx::prefetch_tensormap(&args.x);
        ptx::prefetch_tensormap(&args.weight);
    }
    meet_products<Config>();  //~ product_set_up
    if (warp_idx < loader) {
        set_registers<Config, Config::num_math_registers>();
        ProductWarps<Config>(args, stages).run();
    } else {
        set_registers<Config, Config::num_loader_registers>();
        if (warp_idx > loader) {
            stages.fill_factors(args, warp_idx - loader - 1);
        } else if (ptx::elect_sync()) {
            stages.load(args);
        }
    }
    // A CTA must not exit while the other one may still reach into it.
    if constexpr (Config::cluster_size > 1) meet_products<Config>();  //~ product_left
}

}  // namespace deep_moe
