// Named barriers of one CTA. Ids live here and nowhere else, because two uses of one id would mix
// their arrivals.
//
// No warp may be left behind on a barrier after an abort. So every warp passes the same barriers in
// the same order whether or not its waits succeed: a decision to leave early is made together, by a
// barrier that votes (`ptx::bar_red_and`), never by one warp alone.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

enum class NamedBarrier : uint32_t {
    // All threads of the CTA (__syncthreads), before the roles part.
    cta = 0,

    // Dispatch warps among themselves, all threads sync.
    dispatch = 1,

    // "Nothing of this CTA uses the counts, the pools or the tiles in shared memory any more."
    // Threads: the whole CTA; every warp passes it once, at the end of its block loop
    // (`sync_compute_done`), and all learn whether one of them gave up. Protects the control words
    // that clean-up zeroes and the shared memory that combine takes over.
    compute_done = 2,

    // "All contributions of all ranks lie in this rank's combine buffer." Threads: dispatch and
    // epilogue (`sync_combine_ready`). The dispatch warps come from the rank barrier; all learn
    // whether it was passed.
    combine_ready = 3,

    // All epilogue warps (SM90: math warps) sync; votes on leaving the block loop.
    epilogue = 4,

    // SM100, one per epilogue warpgroup: first_epilogue_warpgroup + warpgroup index (0, 1).
    first_epilogue_warpgroup = 5,

    // SM100, one per loader and MMA warp, of its 32 threads: `reconverge`.
    activation_loader = 7,
    weight_loader = 8,
    mma = 9,

    // Throughput dispatch, warps that count slots among themselves, all threads sync: "the counts
    // in shared memory are zero", and "they have the slots before this CTA's".
    slot_counts = 10,

    // Throughput dispatch, warps that fetch: "the counts of all ranks are here", "they are summed
    // up".
    fetching = 11,
};

}  // namespace deep_moe
