// A role's share of the SM's registers.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/registers.cuh"

namespace deep_moe {

// What roles may have together: 168 for each of 384 threads. MAX_REGISTERS_PER_CTA of choices.py.
inline constexpr uint32_t max_registers_per_cta = 64512;

// What every thread is launched with: the compiler distributes all 64 Ki of an SM, in steps of 8.
template <class Config>
inline constexpr uint32_t launch_registers = 65536 / Config::num_threads / 8 * 8;

// Changes these to the registers of the thread's role. All four warps of a warpgroup.
template <class Config, uint32_t count>
__device__ __forceinline__ void set_registers() {
    if constexpr (count < launch_registers<Config>) {
        ptx::setmaxnreg_dec<count>();
    } else {
        ptx::setmaxnreg_inc<count>();
    }
}

}  // namespace deep_moe
