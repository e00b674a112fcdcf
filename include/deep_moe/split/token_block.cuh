// The tokens of a rank that one CTA takes, on that rank and on those that fetch them.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

// Neighbours, and as many as other CTAs take, or one more. Of `pieces` pieces of each token: the
// pieces.
template <class Config, uint32_t pieces = 1>
struct TokenBlock {
    uint32_t begin;
    uint32_t end;

    __device__ explicit TokenBlock(uint32_t num_tokens)
        : begin(before(num_tokens, blockIdx.x)), end(before(num_tokens, blockIdx.x + 1)) {}

    __device__ uint32_t size() const { return end - begin; }

 private:
    // At most 2^15 tokens and 2^9 CTAs.
    static __device__ uint32_t before(uint32_t num_tokens, uint32_t cta_idx) {
        if constexpr (pieces <= 64) return num_tokens * pieces * cta_idx / Config::num_ctas;
        return static_cast<uint32_t>(uint64_t{num_tokens * pieces} * cta_idx / Config::num_ctas);
    }
};

}  // namespace deep_moe
