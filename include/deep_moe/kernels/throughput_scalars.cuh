// A number for each row of the experts back to the row's slot.
//
// Grid: as dispatch's.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/split/return_rows.cuh"
#include "deep_moe/split/step.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void throughput_scalars(const ThroughputArgs& args) {
    const ThroughputRanks<Config> ranks(args);
    Waiter waiter(args);
    Step<Config> step(ranks, StepKind::scalars);
    if (step.begin(waiter)) {
        share_scalars(args, ranks.local());
        step.arrive();
        step.count_on(waiter);
        bool have_come = true;
        have_come = step.await_grid(waiter);  //~ scalars_of_all_awaited
        if (have_come) fetch_scalars(args, ranks);
    }
    step.end(waiter);
}

}  // namespace deep_moe
