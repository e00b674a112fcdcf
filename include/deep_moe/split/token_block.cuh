// The tokens of a rank that one CTA takes, on that rank and on those that fetch them.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

// Neighbours, and as many as other CTAs take, or one more.
template <class Config>
struct TokenBlock {
    uint32_t begin;
    uint32_t end;

    __device__ explicit TokenBlock(uint32_t num_tokens)
        : begin(before(num_tokens, blockIdx.x)), end(before(num_tokens, blockIdx.x + 1)) {}

    __device__ uint32_t size() const { return end - begin; }

 private:
    // At most 2^15 tokens and 2^16 CTAs.
    static __device__ uint32_t before(uint32_t num_tokens, uint32_t cta_idx) {
        return num_tokens * cta_idx / Config::num_ctas;
    }
};

}  // namespace deep_moe
