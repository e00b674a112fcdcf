// How a loader fills stages: one thread waits for each and starts its copies.
//
// A loader's instructions for a stage bound calls whose stages are small. So its warp comes
// together only where it has more to do than to load, and not to agree on each wait.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// For the k-blocks of a block from k_block_idx up to `end`, in order: waits until the next stage is
// free, and calls start(k_block_idx, stage). In front of a block's first k-block, when its stage is
// free, start_block(stage). `place`: the first of the stages. One thread; false after an abort.
template <class Config, class StartBlock, class Start>
__device__ __forceinline__ bool fill_stages(const SharedMemory<Config>& smem, Waiter& waiter,
                                            WaitSite site, RingPosition<Config::num_stages> place,
                                            uint32_t k_block_idx, uint32_t end,
                                            const StartBlock& start_block, const Start& start) {
    const auto wait = [&] {
        return waiter.mbarrier(site, smem.empty_barriers(place.stage), place.parity ^ 1);
    };
    if (k_block_idx == 0) {
        if (!wait()) return false;
        start_block(place.stage);
    }
    for (; k_block_idx < end; ++k_block_idx) {
        //~ sm90_stage_free
        if (!wait()) return false;
        start(k_block_idx, place.stage);
        place.advance();
    }
    return true;
}

}  // namespace deep_moe::sm90
