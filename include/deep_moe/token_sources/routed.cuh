// Tokens that other ranks have, and whose results go back to them: the fused call.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/combine/combine.cuh"
#include "deep_moe/dispatch/dispatch.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// What `Config::Tokens` is:
//   are_here      whether the tokens of this rank's experts lie here when the kernel starts, and
//                 the caller says how many each has
//   Places        where they lie, and where results go
//   bring(args, shared_memory, publish)
//                 the dispatch warps' work, from beginning to end. A warp that pulls no tokens
//                 calls publish(local, waiter) meanwhile
//   finish(args, shared_memory, warp_idx, waiter)
//                 what the warps do that have done the epilogues; `warp_idx` counts from the first
//                 of them
struct RoutedTokens {
    static constexpr bool are_here = false;

    template <class Config>
    using Places = RankBuffers<Config>;

    template <class Config, class Publish>
    static __device__ __forceinline__ void bring(const KernelArgs& args, uint32_t shared_memory,
                                                 const Publish& publish) {
        dispatch<Config, typename Config::Weights::template PullPolicy<Config>>(args, shared_memory,
                                                                                publish);
    }

    template <class Config>
    static __device__ __forceinline__ void finish(const KernelArgs& args, uint32_t shared_memory,
                                                  uint32_t warp_idx, Waiter& waiter) {
        combine<Config>(args, shared_memory, warp_idx, waiter);
    }
};

}  // namespace deep_moe
