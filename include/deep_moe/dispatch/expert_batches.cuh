// The experts of all ranks, divided among the dispatch threads of a CTA. A thread's share is cut
// into batches: the thread starts its loads for all experts of a batch before it waits for the
// first answer.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"

namespace deep_moe {

template <class Config>
class ExpertBatch {
    static constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;

 public:
    // Most experts of a batch: each 64-bit word that a thread keeps costs two registers.
    static constexpr uint32_t size = min(ceil_div(Config::num_experts, num_threads), 8u);
    static constexpr uint32_t distance = size * num_threads;  // from one batch to the next

    __device__ explicit ExpertBatch(uint32_t first_expert_idx)
        : first_expert_idx_(first_expert_idx) {}

    // Calls visit(expert_idx, i) for each expert of the batch, i of them before it.
    template <class Visit>
    __device__ __forceinline__ void for_each(const Visit& visit) const {
#pragma unroll
        for (uint32_t i = 0; i < size; ++i) {
            const uint32_t expert_idx = first_expert_idx_ + i * num_threads;
            if (expert_idx < Config::num_experts) visit(expert_idx, i);
        }
    }

 private:
    uint32_t first_expert_idx_;
};

// Calls visit(batch) for the batches of a dispatch thread.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_expert_batch(uint32_t thread_idx, const Visit& visit) {
    for (uint32_t first = thread_idx; first < Config::num_experts;
         first += ExpertBatch<Config>::distance) {
        visit(ExpertBatch<Config>(first));
    }
}

}  // namespace deep_moe
