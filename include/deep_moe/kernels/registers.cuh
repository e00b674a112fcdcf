// A role's share of the SM's registers.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/registers.cuh"

namespace deep_moe {

// Changes the registers that every thread is launched with to those of its role. The compiler
// distributes all 64 Ki of an SM, in steps of 8. All four warps of a warpgroup.
template <class Config, uint32_t count>
__device__ __forceinline__ void set_registers() {
    constexpr uint32_t launch_count = 65536 / Config::num_threads / 8 * 8;
    if constexpr (count < launch_count) {
        ptx::setmaxnreg_dec<count>();
    } else {
        ptx::setmaxnreg_inc<count>();
    }
}

}  // namespace deep_moe
