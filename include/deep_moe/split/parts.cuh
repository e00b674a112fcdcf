// What a CTA shares with other ranks goes in parts, so that they fetch the first ones while it
// makes those that follow.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/throughput_warps.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// What each sharing warp of a CTA tells another CTA in a round: one unit for each part but the
// last, and with that one the rest. So rounds have equally many units, however many parts there
// are.
inline constexpr uint32_t units_per_round = 32;

// How a CTA's items are cut: into equal parts of `least` items or more, the last of which may be
// shorter. Without items there is one part.
template <uint32_t least>
class Parts {
 public:
    __device__ explicit Parts(uint32_t num_items)
        : num_items_(num_items),
          length_(max(least, ceil_div(num_items, units_per_round))),
          count_(max(1u, ceil_div(num_items, length_))) {}

    __device__ uint32_t count() const { return count_; }
    __device__ uint32_t begin(uint32_t part) const { return min(part * length_, num_items_); }
    __device__ uint32_t end(uint32_t part) const { return begin(part + 1); }
    // The part of an item; of one behind the last item the last part.
    __device__ uint32_t of(uint32_t item) const { return min(item / length_, count_ - 1); }
    __device__ bool is_last(uint32_t part) const { return part + 1 >= count_; }
    // Units that a CTA has told with this part and all before it.
    __device__ uint32_t units_through(uint32_t part) const {
        return is_last(part) ? units_per_round : part + 1;
    }
    // With this one alone: none with a part that there is not.
    __device__ uint32_t units(uint32_t part) const {
        if (part >= count_) return 0;
        return units_through(part) - part;
    }

 private:
    uint32_t num_items_;
    uint32_t length_;
    uint32_t count_;
};

// A warp's: how much of the same CTA's data of all ranks it has waited for. `parts_of(rank_idx)`:
// how that rank's are cut, of whose items this warp takes those with equal numbers.
template <class Config, class Step, class PartsOf>
class PartWait {
 public:
    __device__ PartWait(const Step& step, const PartsOf& parts_of, Waiter& waiter)
        : step_(step), parts_of_(parts_of), waiter_(waiter) {}

    // A whole converged warp: until an item and all before it may be fetched from all ranks. False
    // if this rank gave up.
    __device__ bool reach(uint32_t item) {
        if (item < end_) return !waiter_.aborted();
        uint32_t end = all_items;
        constexpr uint32_t num_words = Config::num_ranks * sharing_warps<Config>;
        for (uint32_t i = ptx::lane_idx(); i < num_words; i += warp_size) {
            const uint32_t rank_idx = i / sharing_warps<Config>;
            const auto parts = parts_of_(rank_idx);
            const uint32_t part = parts.of(item);
            step_.await_units(rank_idx, i % sharing_warps<Config>, parts.units_through(part),
                              waiter_);
            if (!parts.is_last(part)) end = min(end, parts.end(part));
        }
        const bool has_come = waiter_.warp_agrees(!waiter_.aborted());
        end_ = ptx::redux_sync_min(end);
        return has_come;
    }
    // The same of all items.
    __device__ void reach_end() { reach(all_items - 1); }

 private:
    static constexpr uint32_t all_items = 0xffffffff;

    const Step& step_;
    const PartsOf& parts_of_;
    Waiter& waiter_;
    uint32_t end_ = 0;  // of what has come from all
};

}  // namespace deep_moe
