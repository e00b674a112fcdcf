// A barrier over all CTAs of one rank's grid, which are all resident at once.
//
// One 32-bit counter: bit 31 is the phase, the bits below count arrivals. CTA 0 adds
// 2^31 - (CTAs - 1), the others add 1, so that the last arrival, whoever it is, carries into bit 31
// and leaves the bits below at zero: the barrier resets itself and can be used again at once.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// One warp per CTA, all lanes. What happened before it in any CTA (or, in a CTA, before a CTA-level
// barrier in front of it) happens before what follows it in every CTA.
//
// Order: the addition is an acquire and a release at gpu scope, so each CTA's arrival passes on
// what the earlier arrivals had published, and the poll acquires all of it.
template <uint32_t num_ctas>
__device__ __forceinline__ bool grid_barrier(WaitSite site, uint32_t* counter, uint32_t cta_idx,
                                             Waiter& waiter) {
    constexpr uint32_t phase_bit = 0x80000000;
    bool arrived = !waiter.aborted();
    if (arrived && ptx::lane_idx() == 0) {
        const uint32_t old =
            ptx::atom_add_acq_rel_gpu(counter, cta_idx == 0 ? phase_bit - (num_ctas - 1) : 1);
        const auto num_arrivals = [&] {
            const uint32_t now = ptx::ld_acquire_gpu(counter);
            if (((now ^ old) & phase_bit) != 0) return num_ctas;
            const uint32_t count = now & ~phase_bit;
            // With CTA 0 among them the count stands num_ctas below the carry.
            return count < num_ctas ? count : count + num_ctas - phase_bit;
        };
        arrived = waiter.until(site, num_ctas, num_arrivals);
    }
    return waiter.warp_agrees(arrived);
}

}  // namespace deep_moe
