// Time stamps from inside the kernel, in a kernel made with Config::trace. Without it a Tracer is
// an empty class and the kernel is the same, instruction for instruction, as if there were none.
//
// A track is what one warp of a CTA does, step after step: a mark says which step begins, and ends
// the one before. Stamps are %clock64, a counter of its own in every SM, because %globaltimer may
// move only once in a microsecond. Two anchors per CTA, pairs of both clocks read when the global
// one has just moved, turn the one into the other.
//
// deep_moe/trial/trace/ reads the buffer, and the names of steps and tracks out of this file.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/ptx/timer.cuh"

namespace deep_moe {

// The comment on each line is the name that readers of a trace see.
enum class TraceTrack : uint32_t {
    dispatch = 0,           // dispatch
    activation_loader = 1,  // activation loader
    weight_loader = 2,      // weight loader
    math = 3,               // math
    epilogue = 4,           // epilogue
    combine = 5,            // combine
};
inline constexpr uint32_t num_trace_tracks = 6;

// The comment on each line is the name that readers of a trace see.
enum class TraceStep : uint16_t {
    none = 0,                          // nothing recorded
    end = 1,                           // end of the track
    count_tokens = 2,                  // count tokens
    gather_before_publish = 3,         // gather CTAs before counts are published
    publish_counts = 4,                // publish counts
    await_counts = 5,                  // wait for token counts
    pull = 6,                          // pull
    await_compute = 7,                 // wait for this CTA's blocks
    gather_before_combine = 8,         // gather CTAs before combine
    clean_up = 9,                      // clean up
    rank_barrier_before_combine = 10,  // rank barrier before combine
    rank_barrier_after_cleanup = 11,   // rank barrier after clean-up
    await_l1_tokens = 12,              // wait for Linear1 tokens
    await_l2_tokens = 13,              // wait for Linear2 tokens
    load_l1 = 14,                      // load Linear1
    load_l2 = 15,                      // load Linear2
    await_block = 16,                  // wait for a block
    l1_main_loop = 17,                 // Linear1 main loop
    l2_main_loop = 18,                 // Linear2 main loop
    l1_epilogue = 19,                  // Linear1 epilogue
    l2_epilogue = 20,                  // Linear2 epilogue
    await_combine = 21,                // wait for combine
    combine = 22,                      // combine
    await_header = 23,                 // wait to be told of a block
};

// detail: what the step is about. await_l*_tokens: the pool block. load_*, *_main_loop, *_epilogue:
// which weights, see LinearOf::weight_block_row; if num_rows is 0, nothing. await_block: ticks that
// the main loop before it waited for stages behind its first. Else 0.
struct TraceRecord {
    uint64_t ticks;
    TraceStep step;
    uint16_t num_rows;  // valid rows of the block, or 0
    uint32_t detail;
};
static_assert(sizeof(TraceRecord) == 16);

struct TraceAnchor {
    uint64_t ticks;
    uint64_t global_ns;
};

// What stands in front of the records, for each CTA.
struct TraceCta {
    TraceAnchor first;
    TraceAnchor last;
    uint32_t num_lost[num_trace_tracks];  // records that found no room
    uint32_t sm_idx;
    uint32_t padding;
};
static_assert(sizeof(TraceCta) == 64);

// Where the host finds them: TraceCta [num_sms], then TraceRecord
// [num_sms][num_trace_tracks][trace_capacity]. All zero before the call.
template <class Config>
struct TraceBuffer {
    static __device__ TraceCta* cta(const KernelArgs& args) {
        return static_cast<TraceCta*>(args.trace) + blockIdx.x;
    }
    static __device__ TraceRecord* records(const KernelArgs& args, TraceTrack track) {
        auto* const first =
            reinterpret_cast<TraceRecord*>(static_cast<TraceCta*>(args.trace) + Config::num_sms);
        const uint32_t idx = blockIdx.x * num_trace_tracks + static_cast<uint32_t>(track);
        return first + uint64_t{idx} * args.trace_capacity;
    }
};

// Both clocks at a moment when the global one has just moved, which it does within 2 us; a look
// takes 10 ns or more.
__device__ inline TraceAnchor read_trace_anchor() {
    constexpr uint32_t max_looks = 256;
    const uint64_t before = ptx::globaltimer();
    uint64_t now = before;
    for (uint32_t i = 0; i < max_looks && now == before; ++i) now = ptx::globaltimer();
    return {ptx::clock64(), now};
}

// One track. Any set of threads calls its methods, as long as `writer` (a threadIdx.x), who alone
// records, is among them. Addresses are made anew for each mark: a role that is short of registers
// keeps one, the number of marks.
template <class Config, bool is_on = Config::trace>
class Tracer {
 public:
    __device__ Tracer(const KernelArgs& args, TraceTrack track, uint32_t writer)
        : args_(args), track_(track), writer_(writer) {}

    __device__ __forceinline__ void mark(TraceStep step, uint32_t detail = 0,
                                         uint32_t num_rows = 0) {
        if (threadIdx.x == writer_) {
            const uint64_t ticks = ptx::clock64();
            if (num_marks_ < args_.trace_capacity) {
                TraceBuffer<Config>::records(args_, track_)[num_marks_] = {
                    ticks, step, static_cast<uint16_t>(num_rows), detail};
            } else {
                TraceBuffer<Config>::cta(args_)->num_lost[static_cast<uint32_t>(track_)] =
                    num_marks_ - args_.trace_capacity + 1;
            }
        }
        ++num_marks_;
    }

    // Once per CTA each, by a role that has time for it.
    __device__ void first_anchor() const {
        if (threadIdx.x != writer_) return;
        TraceBuffer<Config>::cta(args_)->first = read_trace_anchor();
        TraceBuffer<Config>::cta(args_)->sm_idx = ptx::smid();
    }
    __device__ void last_anchor() const {
        if (threadIdx.x == writer_) TraceBuffer<Config>::cta(args_)->last = read_trace_anchor();
    }

 private:
    const KernelArgs& args_;
    TraceTrack track_;
    uint32_t writer_;
    uint32_t num_marks_ = 0;
};

template <class Config>
class Tracer<Config, false> {
 public:
    __device__ Tracer(const KernelArgs&, TraceTrack, uint32_t) {}
    __device__ __forceinline__ void mark(TraceStep, uint32_t = 0, uint32_t = 0) const {}
    __device__ void first_anchor() const {}
    __device__ void last_anchor() const {}
};

// Adds up time between `start` and `stop`, in ticks; below 2^32, some two seconds.
template <class Config, bool is_on = Config::trace>
class TraceStopwatch {
 public:
    __device__ __forceinline__ void reset() { sum_ = 0; }
    __device__ __forceinline__ void start() { sum_ -= ptx::clock(); }
    __device__ __forceinline__ void stop() { sum_ += ptx::clock(); }
    __device__ __forceinline__ uint32_t ticks() const { return sum_; }

 private:
    uint32_t sum_ = 0;
};

template <class Config>
class TraceStopwatch<Config, false> {
 public:
    __device__ __forceinline__ void reset() const {}
    __device__ __forceinline__ void start() const {}
    __device__ __forceinline__ void stop() const {}
    __device__ __forceinline__ uint32_t ticks() const { return 0; }
};

}  // namespace deep_moe
