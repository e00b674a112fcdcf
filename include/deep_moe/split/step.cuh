// A step of the throughput all-to-all: every rank writes its data into its own buffer, all ranks
// tell each other so, and each fetches what is for it.
//
// A step's data may be written again when all ranks have fetched it. A rank has fetched it when it
// arrives in its next step. So no wait is needed if another kind of step, which writes elsewhere,
// comes in between. Two steps of one kind in a row begin with one more round of arrivals. Nothing
// is stored twice, and the words that count rounds are never reset.
//
// Ranks go through the same steps in the same order; which kind the last one was is kept on the
// device, so that a CUDA graph may be replayed behind any step.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/arrivals.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/sync/grid_gather.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// What a step takes over the links. Each has memory of its own.
enum class StepKind : uint32_t { none = 0, tokens = 1, rows = 2, scalars = 3 };

template <class Config>
class Step {
 public:
    __device__ Step(const ThroughputRanks<Config>& ranks, StepKind kind, Waiter& waiter)
        : ranks_(ranks), kind_(kind), waiter_(waiter) {}

    // All threads of a CTA, first of all: until this rank may write. False if this or an earlier
    // kernel of this rank gave up.
    __device__ bool begin() {
        const ThroughputBuffer<Config> local = ranks_.local();
        round_ = ptx::ld_relaxed_gpu(local.num_rounds());
        const auto last_step = static_cast<StepKind>(ptx::ld_relaxed_gpu(local.last_step()));
        waiter_.follow(ptx::ld_relaxed_gpu(local.gave_up()) == 0);
        if (!cta_agrees<Config>(waiter_)) return false;
        if (last_step != kind_) return true;  //~ same_kind_meets
        arrive();
        return await();
    }

    // All threads of a CTA: what it has written may be fetched.
    __device__ void arrive() const {
        arrive_at_ranks<Config>(ranks_, AllRanks{}, [&](const ThroughputBuffer<Config>& buffer) {
            return buffer.arrivals(ranks_.rank_idx());
        });
    }

    // All threads of a CTA, which has arrived: until all ranks have.
    __device__ bool await() {
        const WaitSite site =
            kind_ == StepKind::tokens ? WaitSite::split_tokens : WaitSite::split_contributions;
        const auto arrivals = [&](uint32_t rank_idx) { return ranks_.local().arrivals(rank_idx); };
        const uint32_t num_earlier = round_ * Config::num_ctas;
        ++round_;
        return await_ranks<Config>(site, AllRanks{}, arrivals, 1, WaitCost(nullptr), waiter_,
                                   num_earlier);
    }

    // All threads of a CTA, which has passed its last wait. Counts on when all CTAs of the rank
    // have begun; true in the thread that does. The last warp asks, before it fetches anything, so
    // that nobody is left to ask at the end of the kernel.
    __device__ bool count_on() const {
        if (ptx::warp_idx() != Config::num_threads / warp_size - 1) return false;
        const ThroughputBuffer<Config> local = ranks_.local();
        const bool is_last = grid_gather<Config::num_ctas>(local.gather_counter(), waiter_);
        if (!is_last || ptx::lane_idx() != 0) return false;
        ptx::st_relaxed_sys(local.num_rounds(), round_);                       //~ rounds_counted
        ptx::st_relaxed_sys(local.last_step(), static_cast<uint32_t>(kind_));  //~ step_kept
        return true;
    }

    // All threads of a CTA, last of all.
    __device__ void end() const {
        if (waiter_.aborted() && threadIdx.x == 0) {
            ptx::red_or_relaxed_gpu(ranks_.local().gave_up(), 1);
        }
    }

 private:
    const ThroughputRanks<Config>& ranks_;
    StepKind kind_;
    Waiter& waiter_;
    uint32_t round_ = 0;  // of arrivals, that comes next
};

}  // namespace deep_moe
