// How a rank learns that another rank has sent its data.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/timer.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// Clocks that pass until each rank has come, from where this is made: for the first CTA of the grid
// to tell, if the caller wants to know.
class WaitCost {
 public:
    // wait_cycles: [ranks], or null.
    __device__ explicit WaitCost(int64_t* wait_cycles)
        : wait_cycles_(blockIdx.x == 0 ? wait_cycles : nullptr),
          begin_(wait_cycles_ == nullptr ? 0 : ptx::clock64()) {}

    __device__ bool is_asked() const { return wait_cycles_ != nullptr; }

    // One thread for each rank, when it has come.
    __device__ void add(uint32_t rank_idx) const {
        if (!is_asked()) return;
        wait_cycles_[rank_idx] += static_cast<int64_t>(ptx::clock64() - begin_);
    }

 private:
    int64_t* wait_cycles_;
    uint64_t begin_;
};

// One thread: waits until `num_expected` arrivals have come from a rank, above `num_earlier`, and
// acquires what was written before them. `arrivals`: that rank's word in this rank's buffer.
__device__ __forceinline__ bool await_arrivals_of(WaitSite site, const int32_t* arrivals,
                                                  uint32_t rank_idx, uint32_t num_expected,
                                                  Waiter& waiter, uint32_t num_earlier = 0) {
    // A CTA that has seen all come may have come to the next round before this one looks.
    const auto num_arrived = [&] {
        const auto seen = ptx::ld_acquire_sys(arrivals);  //~ arrival_acquired
        return min(static_cast<uint32_t>(seen) - num_earlier, num_expected);
    };
    const auto late_rank = [&] {
        RankSet set;
        set.insert(rank_idx);
        return set;
    };
    return waiter.until(site, num_expected, num_arrived, late_rank);
}

// All threads of a CTA, or of a group of its first ones: the same for each rank. Then the whole
// group may read what was written before these arrivals: the barrier passes it on. `arrivals`,
// `num_expected`: of a rank's number.
template <class Config, class Active, class Arrivals, class Expected,
          class Group = WholeCta<Config>>
__device__ bool await_arrivals(WaitSite site, const Active& active, const Arrivals& arrivals,
                               const Expected& num_expected, const WaitCost& cost, Waiter& waiter,
                               uint32_t num_earlier, const Group& group = {}) {
    for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += group.num_threads) {
        if (!active.contains(i)) continue;
        await_arrivals_of(site, arrivals(i), i, num_expected(i), waiter, num_earlier);
        cost.add(i);
    }
    return group.agrees(waiter);  //~ arrivals_passed_on
}

}  // namespace deep_moe
