// A step of the throughput all-to-all: every rank writes its data, into its own buffer or, in a
// combine, into the other ranks'; they tell each other so, and each reads what is for it.
//
// A CTA shares what CTAs of the same number read on all ranks, and tells them alone, part after
// part (parts.cuh). So each of them begins when it has the first part, and no CTA waits for all.
//
// A step's data may be written again when all ranks have read it. A rank has read it when any of
// its CTAs tells something in its next step, since kernels of a rank follow each other. Every
// CTA that reads waits in each step for all that is told to it. So no other wait is needed if
// another kind of step, which writes elsewhere, comes in between. Two steps of one kind in a row
// begin with one more round of arrivals. Nothing is stored twice, and the words that count are
// never reset.
//
// In a combine a rank sends rows or has them fetched, and all must do the same. Units told by a
// rank whose rows are fetched carry a mark, by which the others notice one that does not agree.
//
// Ranks go through the same steps in the same order; which kind the last one was is kept on the
// device, so that a CUDA graph may be replayed behind any step.
//
// Nothing is told to a masked rank, and nothing awaited from it. So its words and those of the
// others count different rounds from then on: it is kept on the device, too, who was left out, and
// a step in which such a rank takes part again is refused until all ranks have been reset.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/parts.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/throughput_warps.cuh"
#include "deep_moe/sync/grid_gather.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// What a step takes over the links. Each has memory of its own.
enum class StepKind : uint32_t { none = 0, tokens = 1, rows = 2, scalars = 3 };

// Told with the only part of a combine whose rows are fetched. All ranks tell it in the same
// rounds, or stop, so that this bit of the words is as much their sum as the others are.
inline constexpr uint32_t fetched_mark = 1u << 31;

template <class Config>
class Step {
 public:
    // mark: told with all units of this step, 0 or `fetched_mark`.
    __device__ Step(const ThroughputRanks<Config>& ranks, StepKind kind, uint32_t mark = 0)
        : ranks_(ranks), kind_(kind), mark_(mark) {}

    // All threads of a CTA, first of all: until this rank may write. False if this or an earlier
    // kernel of this rank gave up.
    __device__ bool begin(Waiter& waiter) {
        const ThroughputBuffer<Config> local = ranks_.local();
        told_before_ = ptx::ld_relaxed_gpu(local.units_told());
        const auto last_step = static_cast<StepKind>(ptx::ld_relaxed_gpu(local.last_step()));
        waiter.follow(ptx::ld_relaxed_gpu(local.gave_up()) == 0);
        if constexpr (Config::masks_ranks) check_mask(local, waiter);
        if (!cta_agrees<Config>(waiter)) return false;
        has_met_ = last_step != kind_;
        if (has_met_) return true;  //~ same_kind_meets
        arrive();
        for (uint32_t i = threadIdx.x; i < num_words; i += Config::num_threads) {
            await_units(i / num_streams, i % num_streams, units_per_round, waiter);
        }
        told_before_ += units_per_round;
        has_met_ = true;
        return cta_agrees<Config>(waiter);  //~ kinds_met
    }

    // One thread for each rank, behind a barrier of the threads that have written something: its
    // CTA of this number may read that. warp: which of the sharing warps tells. A masked rank is
    // told nothing.
    //
    // Order: the barrier puts all writes of these threads before the release at sys scope, which
    // covers them.
    __device__ void tell(uint32_t rank_idx, uint32_t warp, uint32_t units) const {
        if (!ranks_.active().contains(rank_idx)) return;  //~ masked_not_told
        auto* const word = ranks_.of(rank_idx).arrivals(blockIdx.x, ranks_.rank_idx(), warp);
        ptx::red_add_release_sys(word, static_cast<int32_t>(units));  //~ part_released
    }

    // A whole sharing warp, the warp'th: what it has written of a part may be read, `units` of it
    // by each rank. Sharing warps do not wait for each other, as a release takes microseconds.
    template <class Units>
    __device__ void tell_all(uint32_t warp, const Units& units) const {
        __syncwarp();  //~ rest_written
        for (uint32_t i = ptx::lane_idx(); i < Config::num_ranks; i += warp_size) {
            if (units(i) != 0) tell(i, warp, units(i));
        }
    }

    // All threads of a CTA, for all sharing warps: what it has written may be read.
    template <class Units>
    __device__ void arrive(const Units& units) const {
        cta_sync<Config>();  //~ part_written
        for (uint32_t i = threadIdx.x; i < num_words; i += Config::num_threads) {
            tell(i / num_streams, i % num_streams, units(i / num_streams));
        }
    }
    // The same of all of it.
    __device__ void arrive() const {
        const uint32_t units = units_per_round + (has_met_ ? mark_ : 0);
        arrive([&](uint32_t) { return units; });
    }

    // One thread, or several independently: until a sharing warp of a rank's CTA, the one of this
    // number, has told so many units in this round; at once if the rank is masked. What the thread
    // acquires a barrier or a vote passes on.
    __device__ bool await_units(uint32_t rank_idx, uint32_t warp, uint32_t units, Waiter& waiter,
                                uint32_t cta_idx = blockIdx.x) const {
        if (!ranks_.active().contains(rank_idx)) return !waiter.aborted();  //~ masked_not_awaited
        const WaitSite site =
            kind_ == StepKind::tokens ? WaitSite::split_tokens : WaitSite::split_contributions;
        const auto* const word = ranks_.local().arrivals(cta_idx, rank_idx, warp);
        uint32_t told = 0;
        const auto num_told = [&] {
            // It may be ahead by parts, and by the next round.
            const auto seen = static_cast<uint32_t>(ptx::ld_acquire_sys(word));  //~ part_acquired
            told = seen - told_before_;
            return min(told & ~fetched_mark, units);
        };
        const auto late_rank = [&] {
            RankSet set;
            set.insert(rank_idx);
            return set;
        };
        if (!waiter.until(site, units, num_told, late_rank)) return false;
        // A rank's next round may have a mark if this one is not of rows, or is where ranks meet.
        const bool has_mark = (told & fetched_mark) != 0;
        const bool is_own = kind_ == StepKind::rows && has_met_;  //~ mark_is_of_rows
        if (is_own && has_mark != (mark_ != 0)) {
            //~ mark_compared
            waiter.fail(WaitCode::rows_elsewhere, site, mark_ != 0, mark_ == 0, late_rank());
        }
        return !waiter.aborted();
    }

    // All threads of a CTA: until all CTAs of all ranks have told all, where data is not shared by
    // number.
    __device__ bool await_grid(Waiter& waiter) const {
        for (uint32_t i = threadIdx.x; i < num_words * Config::num_ctas; i += Config::num_threads) {
            await_units(i % num_words / num_streams, i % num_streams, units_per_round, waiter,
                        i / num_words);
        }
        return cta_agrees<Config>(waiter);  //~ grid_agreed
    }

    // All threads of a CTA, behind `begin`. Counts on when all CTAs of the rank have come here;
    // true in the thread that does. The last warp asks, before it does anything else, so that
    // nobody is left to ask at the end of the kernel.
    __device__ bool count_on(const Waiter& waiter) const {
        if (ptx::warp_idx() != Config::num_threads / warp_size - 1) return false;
        const ThroughputBuffer<Config> local = ranks_.local();
        const bool is_last = grid_gather<Config::num_ctas>(local.gather_counter(), waiter);
        if constexpr (Config::masks_ranks) {
            if (is_last) keep_left_out(local);
        }
        if (!is_last || ptx::lane_idx() != 0) return false;
        //~ rounds_counted
        ptx::st_relaxed_sys(local.units_told(), told_before_ + units_per_round + mark_);
        ptx::st_relaxed_sys(local.last_step(), static_cast<uint32_t>(kind_));  //~ step_kept
        return true;
    }

    // All warps of a CTA, last of all.
    __device__ void end(const Waiter& waiter) const {
        if (waiter.aborted() && ptx::lane_idx() == 0) {
            ptx::red_or_relaxed_gpu(ranks_.local().gave_up(), 1);
        }
    }

 private:
    static constexpr uint32_t num_streams = sharing_warps<Config>;
    static constexpr uint32_t num_words = Config::num_ranks * num_streams;

    // All threads of a CTA, in front of a barrier that votes: gives up if the rank itself is
    // masked, or if another one takes part again.
    __device__ void check_mask(const ThroughputBuffer<Config>& local, Waiter& waiter) const {
        for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
            const bool is_active = ranks_.active().contains(i);
            if (i == ranks_.rank_idx() && !is_active) {
                //~ own_mask_refused
                waiter.fail(WaitCode::masked_itself, WaitSite::none, 0, 0);
            }
            if (is_active && ptx::ld_relaxed_gpu(local.left_out(i)) != 0) {
                RankSet set;
                set.insert(i);
                waiter.fail(WaitCode::masked_before, WaitSite::none, 0, 0, set);  //~ return_refused
            }
        }
    }

    // A whole warp of the rank, when all its CTAs have read who was left out before.
    __device__ void keep_left_out(const ThroughputBuffer<Config>& local) const {
        for (uint32_t i = ptx::lane_idx(); i < Config::num_ranks; i += warp_size) {
            if (!ranks_.active().contains(i)) {
                ptx::st_relaxed_sys(local.left_out(i), 1u);  //~ left_out_kept
            }
        }
    }

    const ThroughputRanks<Config>& ranks_;
    StepKind kind_;
    uint32_t mark_;
    bool has_met_ = false;      // ranks, where they must
    uint32_t told_before_ = 0;  // by every sharing warp, up to this round
};

}  // namespace deep_moe
