// The symmetric buffers of all ranks. The layout is the same everywhere, so a peer's segment is
// reached by the same accessor on another base address.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/layout/token_source.cuh"

namespace deep_moe {

template <class Config>
class RankBuffers {
    static_assert(Config::num_ranks >= 1 && Config::num_ranks <= max_num_ranks,
                  "KernelArgs has room for 1..72 ranks");
    static_assert(Config::num_experts == Config::num_ranks * Config::num_experts_per_rank,
                  "experts are spread evenly over the ranks");

 public:
    // Keeps a reference: `args` is the kernel's __grid_constant__ parameter.
    __device__ explicit RankBuffers(const KernelArgs& args) : args_(args) {}

    __device__ uint32_t rank_idx() const { return args_.rank_idx; }
    __device__ SymmBuffer<Config> local() const { return of(args_.rank_idx); }
    __device__ SymmBuffer<Config> of(uint32_t rank_idx) const {
        return SymmBuffer<Config>(args_.rank_buffers[rank_idx]);
    }

    // The row of a token's result, in the combine buffer of the rank that it came from.
    __device__ uint16_t* result_row(const TokenSource& source) const {
        return of(source.rank_idx).combine(source.topk_idx, source.token_idx);
    }

 private:
    const KernelArgs& args_;
};

}  // namespace deep_moe
