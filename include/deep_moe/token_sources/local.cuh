// Tokens that are in this rank's memory, and whose results stay there: the experts of the split
// path.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/bring_local_tokens.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/local_rows.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// See token_sources/routed.cuh. `Scales`: how the tokens' scales lie.
template <class Scales>
struct LocalTokens {
    static constexpr bool are_here = true;

    template <class Config>
    using Places = LocalRows<Config, Scales>;

    template <class Config, class Publish>
    static __device__ __forceinline__ void bring(const KernelArgs& args, uint32_t shared_memory,
                                                 const Publish& publish) {
        bring_local_tokens<Config, typename Config::Weights::template PullPolicy<Config>>(
            args, shared_memory, publish);
    }

    // The end of the kernel is all that its results wait for.
    template <class Config>
    static __device__ __forceinline__ void finish(const KernelArgs&, uint32_t, uint32_t, Waiter&) {}
};

}  // namespace deep_moe
