// How a rank learns that all CTAs of another rank have sent their data.
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

    // One thread for each rank, when it has come.
    __device__ void add(uint32_t rank_idx) const {
        if (wait_cycles_ == nullptr) return;
        wait_cycles_[rank_idx] += static_cast<int64_t>(ptx::clock64() - begin_);
    }

 private:
    int64_t* wait_cycles_;
    uint64_t begin_;
};

// All threads of a CTA, or of a group of its first ones: waits until `num_expected` arrivals have
// come from each rank, above `num_earlier`. `arrivals(rank_idx)`: that rank's word in this rank's
// buffer. Then the whole group may read what was written before these arrivals: one thread per rank
// acquires it, and the barrier passes it on.
template <class Config, class Active, class Arrivals, class Group = WholeCta<Config>>
__device__ bool await_arrivals(WaitSite site, const Active& active, const Arrivals& arrivals,
                               uint32_t num_expected, const WaitCost& cost, Waiter& waiter,
                               uint32_t num_earlier, const Group& group = {}) {
    for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += group.num_threads) {
        if (!active.contains(i)) continue;
        // A CTA that has seen all come may have come to the next round before this one looks.
        const auto num_arrived = [&] {
            const auto seen = ptx::ld_acquire_sys(arrivals(i));  //~ arrival_acquired
            return min(static_cast<uint32_t>(seen) - num_earlier, num_expected);
        };
        const auto late_rank = [&] {
            RankSet set;
            set.insert(i);
            return set;
        };
        waiter.until(site, num_expected, num_arrived, late_rank);
        cost.add(i);
    }
    return group.agrees(waiter);  //~ arrivals_passed_on
}

// The same until all CTAs of all ranks have arrived `num_rounds` times.
template <class Config, class Active, class Arrivals>
__device__ bool await_ranks(WaitSite site, const Active& active, const Arrivals& arrivals,
                            uint32_t num_rounds, const WaitCost& cost, Waiter& waiter,
                            uint32_t num_earlier = 0) {
    const uint32_t num_expected = num_rounds * Config::num_ctas;  //~ ranks_awaited
    return await_arrivals<Config>(site, active, arrivals, num_expected, cost, waiter, num_earlier);
}

}  // namespace deep_moe
