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
    Step<Config> step(ranks, StepKind::scalars, waiter);
    bool is_sound = step.begin();
    if (is_sound) {
        share_scalars(args, ranks.local());
        step.arrive();
        is_sound = step.await();  //~ scalars_of_all_awaited
    }
    if (is_sound) {
        step.count_on();
        fetch_scalars(args, ranks);
    }
    step.end();
}

}  // namespace deep_moe
