// What a call tells the host, which does not wait for it.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// One warp of the grid: the counts that arrived, from which the host chooses the tile of a later
// call.
template <class Config>
__device__ void tell_host(const KernelArgs& args, const ExpertCounts<Config>& counts) {
    uint32_t received = counts.num_received_tokens();
    if (counts.is_uneven(received)) received |= received_unevenly;
    if (ptx::lane_idx() == 0) ptx::st_relaxed_sys(&args.status->received, received);
}

}  // namespace deep_moe
