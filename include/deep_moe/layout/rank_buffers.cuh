// The symmetric buffers of all ranks of the fused layer.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/rank_views.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/layout/token_source.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

template <class Config>
struct RankBuffers : RankViews<Config, SymmBuffer<Config>, KernelArgs> {
    using RankViews<Config, SymmBuffer<Config>, KernelArgs>::RankViews;

    // The ranks that take part in the call. A whole converged warp, which waits for a load here.
    __device__ CallRanks<Config> active_ranks() const {
        return CallRanks<Config>(this->args().masked_ranks);
    }

    // The row of a token's result, in the combine buffer of the rank that it came from.
    __device__ uint16_t* result_row(const TokenSource& source) const {
        return this->of(source.rank_idx).combine(source.topk_idx, source.token_idx);
    }
};

}  // namespace deep_moe
