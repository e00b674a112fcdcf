// A bias for every row of both layers of every expert. Linear2's comes before the routing weight,
// so that the weight cannot be in what Linear2 multiplies: Linear1's output is that of weight 1.
//
// f32 [E_local][n-blocks of 256 rows][256] (KernelArgs), in the order in which the target's
// epilogues have the rows; behind the last row zeros.
#pragma once

namespace deep_moe {

// See none.cuh.
struct PerExpertBiases {
    static constexpr bool exist = true;

    static __device__ __forceinline__ float linear1_weight(float) { return 1.0f; }
    static __device__ __forceinline__ float linear1(float sum, float scale, float bias) {
        return fmaf(sum, scale, bias);  //~ l1_bias_added
    }
    static __device__ __forceinline__ float linear2(float sum, float scale, float bias,
                                                    float topk_weight) {
        return fmaf(sum, scale, bias) * topk_weight;  //~ l2_bias_added
    }
};

}  // namespace deep_moe
