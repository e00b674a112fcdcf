// All CTAs of one rank's grid come to a gather, and the last of them learns that it is the last: it
// goes on for the rank. No CTA waits or polls here. The others wait for what the last one will
// tell, on this or another rank.
//
// One 32-bit counter holds the number of CTAs that have come; it is zero between gathers. The last
// CTA subtracts all of them before it tells any other, so a CTA that has been told may come to the
// next gather.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// One warp per CTA, all lanes. True in the last CTA that comes, and there what any CTA did before
// it came (in a CTA: before a CTA-level barrier in front of it) happens before what follows. After
// an abort a CTA does not come, so no CTA is the last.
//
// Order: the additions are acquires and releases at gpu scope and follow each other in one chain;
// the last one has observed all of them.
template <uint32_t num_ctas>
__device__ __forceinline__ bool grid_gather(uint32_t* counter, const Waiter& waiter) {
    bool is_last = false;
    if (!waiter.aborted() && ptx::lane_idx() == 0) {
        is_last = ptx::atom_add_acq_rel_gpu(counter, 1) == num_ctas - 1;  //~ gather_last
        if (is_last) ptx::red_add_relaxed_gpu(counter, -num_ctas);        //~ gather_reset
    }
    is_last = __any_sync(full_warp, is_last);
    __syncwarp();  // orders memory, which the vote does not
    return is_last;
}

// Any thread: from here on no CTA of this rank is the last that comes, in later calls too, until
// the host zeroes the counter.
__device__ __forceinline__ void end_gathers(uint32_t* counter) {
    ptx::red_or_relaxed_gpu(counter, 0x80000000);
}

// Any thread: whether that has been said, in this call or in one before it.
__device__ __forceinline__ bool has_given_up(const uint32_t* counter) {
    return (ptx::ld_relaxed_gpu(counter) & 0x80000000) != 0;  //~ earlier_call_failed
}

}  // namespace deep_moe
