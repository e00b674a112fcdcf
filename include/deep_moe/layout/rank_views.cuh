// The symmetric buffers of all ranks. The layout is the same everywhere, so a peer's segment is
// reached by the same accessor on another base address.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"

namespace deep_moe {

// Buffer: the typed view of one of them. Args: the kernel's arguments.
template <class Config, class Buffer, class Args>
class RankViews {
    static_assert(Config::num_ranks >= 1 && Config::num_ranks <= max_num_ranks,
                  "the arguments have room for 1..72 ranks");
    static_assert(Config::num_experts == Config::num_ranks * Config::num_experts_per_rank,
                  "experts are spread evenly over the ranks");

 public:
    // Keeps a reference: `args` is the kernel's __grid_constant__ parameter.
    __device__ explicit RankViews(const Args& args) : args_(args) {}

    __device__ uint32_t rank_idx() const { return args_.rank_idx; }
    __device__ Buffer local() const { return of(args_.rank_idx); }
    __device__ Buffer of(uint32_t rank_idx) const { return Buffer(args_.rank_buffers[rank_idx]); }

 protected:
    __device__ const Args& args() const { return args_; }

 private:
    const Args& args_;
};

}  // namespace deep_moe
