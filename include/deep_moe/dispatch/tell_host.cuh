// What the host learns of a call without waiting for it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// One warp of the grid: what came, from which the host picks the tile of a later call.
// The store needs no order, and has all of the call's time to cross to the host's memory.
template <class Config>
__device__ void tell_host(const KernelArgs& args, const ExpertCounts<Config>& counts) {
    uint32_t received = counts.num_received_tokens();
    if (counts.is_uneven(received)) received |= received_unevenly;
    if (ptx::lane_idx() == 0) ptx::st_relaxed_sys(&args.status->received, received);
}

}  // namespace deep_moe
