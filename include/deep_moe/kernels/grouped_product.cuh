// y[rows of expert e] = x[rows of expert e] times weight[e] transposed, where both are E4M3: x with
// a scale for each row and 128 values along K, weights with one for each 128 x 128. SM90.
//
// Grid: any number of CTAs, one per SM; each takes every gridDim.x-th tile of 128 x 128.
//
//   warps     role
//   0 .. 7    math: products, sums, stores
//   8         loader
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/products/operand_stages.cuh"
#include "deep_moe/products/product_warps.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void grouped_product(const GroupedProductArgs& args) {
    static_assert(Config::num_threads == (Config::num_math_warps + 1) * warp_size,
                  "num_threads is the math warps and the loader");
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const OperandStages<Config> stages(ptx::shared_address(shared_bytes));
    const bool is_loader = ptx::warp_idx() == Config::num_math_warps;
    if (is_loader && ptx::elect_sync()) {
        stages.init_barriers();
        ptx::prefetch_tensormap(&args.x);
        ptx::prefetch_tensormap(&args.weight);
    }
    __syncthreads();  //~ product_set_up
    if (is_loader) {
        if (ptx::elect_sync()) stages.load(args);
    } else {
        ProductWarps<Config>(args, stages).run();
    }
}

}  // namespace deep_moe
