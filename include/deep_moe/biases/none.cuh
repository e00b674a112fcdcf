// No biases: the routing weight is in Linear1's output, and Linear2 has nothing to add.
#pragma once

namespace deep_moe {

// The interface of `Config::Biases`, which per_expert.cuh has, too.
//   exist: whether KernelArgs has biases, and routing weights are needed behind Linear2.
//   linear1_weight: what the activation's result is multiplied by, for a token's routing weight.
//   linear1, linear2: a sum of products, times its scale, as each layer's epilogue goes on with it,
//       in FP32. Arguments that a policy does not name may be anything.
struct NoBiases {
    static constexpr bool exist = false;

    static __device__ __forceinline__ float linear1_weight(float topk_weight) {
        return topk_weight;
    }
    static __device__ __forceinline__ float linear1(float sum, float scale, float) {
        return sum * scale;
    }
    static __device__ __forceinline__ float linear2(float sum, float scale, float, float) {
        return sum * scale;
    }
};

}  // namespace deep_moe
