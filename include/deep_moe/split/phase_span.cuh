// Records when each CTA of a split-path kernel was in which phase, in kernels made with
// Config::trace. Without it a span is an empty class.
//
// Stamps are %clock64; trace/tracer.cuh says why, and what the anchors are for.
// deep_moe/split/profile.py reads them, and the names of phases out of this file.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/timer.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe {

// The comment on each line is the name that readers of a trace see.
enum class SplitPhase : uint32_t {
    quant_and_put = 0,  // quant_and_put
    count_put = 1,      // count_put
    wait = 2,           // wait
    postprocess = 3,    // postprocess
    copy_and_put = 4,   // copy_and_put
    recv_wait = 5,      // recv_wait
    topk_reduce = 6,    // topk_reduce
};

inline constexpr uint32_t num_split_phases = 7;

// What a trace holds for each CTA. A phase whose end is 0 did not run.
struct SplitTraceCta {
    TraceAnchor first;
    TraceAnchor last;
    uint64_t begin_ticks[num_split_phases];
    uint64_t end_ticks[num_split_phases];
};

// From here to the end of the block. All threads of a CTA make one, or those of some warps; one of
// them stamps. args: with `trace`, SplitTraceCta[CTAs], zero before the call.
template <class Config, bool is_on = Config::trace>
class PhaseSpan {
 public:
    template <class Args>
    __device__ PhaseSpan(const Args& args, SplitPhase phase, uint32_t stamping_thread = 0)
        : cta_(args.trace[blockIdx.x]), phase_(phase), stamps_(threadIdx.x == stamping_thread) {
        if (stamps_) cta_.begin_ticks[index()] = ptx::clock64();
    }
    __device__ ~PhaseSpan() {
        if (stamps_) cta_.end_ticks[index()] = ptx::clock64();
    }
    PhaseSpan(const PhaseSpan&) = delete;
    PhaseSpan& operator=(const PhaseSpan&) = delete;

 private:
    __device__ uint32_t index() const { return static_cast<uint32_t>(phase_); }

    SplitTraceCta& cta_;
    SplitPhase phase_;
    bool stamps_;
};

template <class Config>
class PhaseSpan<Config, false> {
 public:
    template <class Args>
    __device__ PhaseSpan(const Args&, SplitPhase, uint32_t = 0) {}
};

// First and last of all in a kernel.
template <class Config, class Args>
__device__ void first_anchor(const Args& args) {
    if constexpr (Config::trace) {
        if (threadIdx.x == 0) args.trace[blockIdx.x].first = read_trace_anchor();
    }
}
template <class Config, class Args>
__device__ void last_anchor(const Args& args) {
    if constexpr (Config::trace) {
        if (threadIdx.x == 0) args.trace[blockIdx.x].last = read_trace_anchor();
    }
}

}  // namespace deep_moe
