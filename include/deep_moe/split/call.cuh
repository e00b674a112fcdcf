// Which call a kernel belongs to, and so which half of the buffer it uses. The rank counts its
// dispatches in its own buffer, so a CUDA graph may be replayed any number of times.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/sync/grid_gather.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// The half of a call, 0 or 1.
__device__ __forceinline__ uint32_t half_of(uint32_t call_idx) {
    return call_idx % 2;  //~ half_in_turn
}

// What a kernel reads of its own buffer before any other wait, so that one wait covers all loads.
struct CallState {
    uint32_t num_calls;
    uint32_t gave_up;

    template <class Config>
    __device__ explicit CallState(const LowLatencyBuffer<Config>& local)
        : num_calls(ptx::ld_relaxed_gpu(local.num_calls())),
          gave_up(ptx::ld_relaxed_gpu(local.gave_up())) {}
};

// All threads of a CTA, which sends call `state.num_calls`. False if an earlier kernel of this rank
// gave up.
//
// No CTA increments the count before all CTAs of the rank have come to the gather of `end_sending`.
template <class Config>
__device__ bool begin_call(const CallState& state, Waiter& waiter) {
    waiter.follow(state.gave_up == 0);
    return cta_agrees<Config>(waiter);
}

// The same in a kernel that goes on with a dispatch, whose call it knows from what that one left.
// Fails if the buffer's half has another call's data by now.
template <class Config>
__device__ bool resume_call(const CallState& state, uint32_t call_idx, Waiter& waiter) {
    const uint32_t age = state.num_calls - call_idx;  // 1 for the newest
    waiter.follow(state.gave_up == 0);
    const bool is_own = age == 1 || age == 2;  //~ half_is_own
    if (!is_own && !waiter.aborted()) {
        waiter.fail(WaitCode::stale_handle, WaitSite::none, 2, age);
    }
    return cta_agrees<Config>(waiter);
}

// A whole warp per CTA, behind a barrier of the CTA. Begins the next call, when all CTAs of the
// rank have read which one this is.
template <class Config>
__device__ void end_sending(const LowLatencyBuffer<Config>& local, const Waiter& waiter) {
    const bool is_last = grid_gather<Config::num_ctas>(local.gather_counter(), waiter);
    if (is_last && ptx::lane_idx() == 0) {  //~ call_counted
        ptx::red_add_relaxed_gpu(local.num_calls(), 1);
    }
}

// Any thread of a CTA that has given up.
template <class Config>
__device__ void stop_later_kernels(const LowLatencyBuffer<Config>& local) {
    ptx::red_or_relaxed_gpu(local.gave_up(), 1);
}

}  // namespace deep_moe
