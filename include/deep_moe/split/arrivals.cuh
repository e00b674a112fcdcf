// How a rank learns that another rank has sent its data.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/timer.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// All threads of a CTA that has sent. `ranks`: the buffers of all; `active`: those that take part.
// `arrivals(buffer)`: this rank's word in another one's buffer.
//
// Order: the barrier puts all writes of the CTA before one thread's release at sys scope for each
// rank, which covers them. The grid's CTAs do not gather first, because that would take longer than
// the additions.
template <class Config, class Ranks, class Active, class Arrivals>
__device__ void arrive_at_ranks(const Ranks& ranks, const Active& active,
                                const Arrivals& arrivals) {
    cta_sync<Config>();  //~ all_sent
    for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
        if (active.contains(i)) {
            ptx::red_add_release_sys(arrivals(ranks.of(i)), 1);  //~ arrival_released
        }
    }
}

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

// The same until all CTAs of all ranks have arrived `num_rounds` times.
template <class Config, class Active, class Arrivals>
__device__ bool await_ranks(WaitSite site, const Active& active, const Arrivals& arrivals,
                            uint32_t num_rounds, const WaitCost& cost, Waiter& waiter) {
    const auto num_expected = [&](uint32_t) {
        return num_rounds * Config::num_ctas;  //~ ranks_awaited
    };
    return await_arrivals<Config>(site, active, arrivals, num_expected, cost, waiter, 0);
}

}  // namespace deep_moe
