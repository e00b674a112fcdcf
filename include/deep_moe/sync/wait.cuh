// Every wait of the kernel. A wait ends with true when what it waits for has happened, or with
// false once this rank has given up: because this wait or any other one on this rank exceeded its
// limit, or because a role refused to go on (`fail`). Nothing traps: the roles leave their loops,
// meet at the common exit, and the host reads the status.
//
// The fast path is the poll and nothing else. After `polls_between_checks` polls a look at the
// clock starts. After `quiet_ns` the status word is read, too, which may be in host memory and
// takes a microsecond there. The thread also sleeps a little between polls then, because the wait
// is no longer a matter of microseconds.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/timer.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// Where a wait stands. The comment on each line is the text of the host's error message.
enum class WaitSite : uint32_t {
    none = 0,                         // no wait
    expert_counts = 1,                // token counts of a local expert from all ranks
    token_arrival = 2,                // a token's bulk copy from its source rank
    rank_barrier_before_combine = 3,  // rank barrier before combine
    combine_arrival = 4,              // a contribution's bulk copy from the combine buffer
    rank_barrier_after_cleanup = 5,   // rank barrier after clean-up
    l1_block_arrival = 6,             // tokens of a pool block, before Linear1 loads them
    l2_block_arrival = 7,             // Linear1 output of a pool block, before Linear2 loads it
    activation_stage_empty = 8,       // a free pipeline stage, to load activations
    weight_stage_empty = 9,           // a free pipeline stage, to load weights
    stage_full = 10,                  // a loaded pipeline stage, to multiply
    accumulator_empty = 11,           // a free accumulator, to multiply
    accumulator_full = 12,            // a complete accumulator, to read
    block_header = 13,                // the next block, from the weight loader
    results_stored = 14,              // results of this CTA's block, to publish Linear1's
    rows_released = 15,               // rows of the pool that an earlier block uses, for a token
    split_counts = 16,                // token counts of another rank, in a split dispatch
    split_tokens = 17,                // tokens of another rank, in a split dispatch
    split_contributions = 18,         // rows of another rank's experts, in a split combine
    block_claim = 19,                 // the next blocks of a cluster, from its first CTA
    list_page = 20,                   // a page for a list of tokens, from another CTA of this rank
    weights_loaded = 21,              // a loaded block of weights, to decode
    decoded_weights_read = 22,        // products of the weights decoded before, to decode others
    pair_slot_free = 23,              // roles that have yet to see an earlier pair of blocks
    block_seen = 24,                  // the warp that publishes, to see an earlier block
};

struct RankSet {
    uint64_t low = 0;   // ranks 0..63
    uint64_t high = 0;  // ranks 64..
    __device__ void insert(uint32_t rank) {
        if (rank < 64) {
            low |= uint64_t{1} << rank;
        } else {
            high |= uint64_t{1} << (rank - 64);  //~ high_rank
        }
    }
    __device__ uint32_t first() const {
        if (low != 0) return __ffsll(static_cast<long long>(low)) - 1;
        if (high != 0) return __ffsll(static_cast<long long>(high)) + 63;  //~ first_high_rank
        return no_peer_rank;
    }
};

// The late ranks of a wait inside a rank: none.
struct NoRanks {
    __device__ RankSet operator()() const { return {}; }
};

class Waiter {
 public:
    // `args`: the kernel's __grid_constant__ parameter, with a `status` and a `wait_timeout_ns`.
    template <class Args>
    __device__ explicit Waiter(const Args& args)
        : status_(args.status), timeout_ns_(args.wait_timeout_ns) {}

    // True once this thread has seen that its rank gave up; all later waits return false at once.
    __device__ bool aborted() const { return aborted_; }

    // One thread, or several independently. `poll()` returns what is there now, and the wait ends
    // when that equals `expected`; any acquire is up to `poll`.
    //
    // For other ranks: `late_ranks()` is asked once, after the limit, who has not arrived.
    // `needs_own_rank`: the wait also depends on all others of this rank.
    template <class Poll, class LateRanks = NoRanks>
    __device__ bool until(WaitSite site, uint64_t expected, const Poll& poll,
                          const LateRanks& late_ranks = {}, bool needs_own_rank = false) {
        if (aborted_) return false;
        Clock clock{(needs_own_rank ? limit_behind_all : limit_at(site)) * timeout_ns_};
        for (uint64_t seen; (seen = poll()) != expected;) {
            if (clock.time_to_check() && give_up(clock, site, expected, seen, late_ranks)) {
                return false;
            }
        }
        return true;
    }

    // A whole converged warp: lane 0 polls, and what it acquired holds for all lanes.
    template <class Poll, class... LateRanks>
    __device__ bool warp_until(WaitSite site, uint64_t expected, const Poll& poll,
                               const LateRanks&... late_ranks) {
        bool arrived = true;
        if (ptx::lane_idx() == 0) arrived = until(site, expected, poll, late_ranks...);
        return warp_agrees(arrived);
    }

    // One thread, or several independently: until the phase of `parity` has ended.
    __device__ bool mbarrier(WaitSite site, uint32_t barrier, uint32_t parity) {
        return until(site, 1, [&] { return ptx::mbarrier_try_wait_parity(barrier, parity); });
    }

    // A whole converged warp: all lanes wait and agree on the outcome.
    __device__ bool warp_mbarrier(WaitSite site, uint32_t barrier, uint32_t parity) {
        return warp_agrees(mbarrier(site, barrier, parity));
    }

    // The same for loops whose addresses shall stay in uniform registers: all that a wait that
    // finds its phase over does is the poll and a vote on it, so that the compiler can tell that
    // the warp leaves it together. Whether a call was given up is asked only where the phase is not
    // over.
    __device__ __forceinline__ bool uniform_mbarrier(WaitSite site, uint32_t barrier,
                                                     uint32_t parity) {
        const auto is_over = [&] {
            return __all_sync(full_warp, ptx::mbarrier_try_wait_parity(barrier, parity));
        };
        if (is_over()) return true;
        Clock clock{limit_at(site) * timeout_ns_};
        while (!is_over()) {
            if (clock.time_to_check() && !warp_agrees(!give_up(clock, site, 1, 0, NoRanks{}))) {
                return false;
            }
        }
        return true;
    }

    // A whole converged warp: true if all lanes say so. Lanes must not part on an abort, because
    // warp-collective instructions follow.
    __device__ bool warp_agrees(bool arrived) {
        arrived = __all_sync(full_warp, arrived);
        aborted_ = aborted_ || !arrived;
        __syncwarp();  //~ vote_ordered: orders memory, which the vote does not
        return arrived;
    }

    // Another warp gave up; told by a barrier that votes.
    __device__ bool follow(bool everyone_arrived) {
        aborted_ = aborted_ || !everyone_arrived;
        return everyone_arrived;
    }

    // Gives up for a reason other than time. One thread. `ranks`: whom it is about, if any.
    __device__ void fail(WaitCode code, WaitSite site, uint64_t expected, uint64_t seen,
                         const RankSet& ranks = {}) {
        report(code, site, expected, seen, 0, ranks);
        aborted_ = true;
    }

 private:
    static constexpr uint32_t polls_between_checks = 32;
    static constexpr uint64_t quiet_ns = 1'000'000;
    static constexpr uint32_t sleep_ns = 200;

    // In units of the call's limit. A wait must not run out before those on which it depends, so
    // that the report names the cause. Waits for other ranks, copies and pages depend on no wait of
    // this rank; dispatch depends on counts and copies; everything else depends on dispatch; and
    // the end of all CTAs depends on all of it.
    static constexpr uint64_t limit_across_ranks = 1;
    static constexpr uint64_t limit_of_dispatch = 2;
    static constexpr uint64_t limit_behind_dispatch = 3;
    static constexpr uint64_t limit_behind_all = 4;

    static __device__ constexpr uint64_t limit_at(WaitSite site) {
        switch (site) {
            case WaitSite::expert_counts:
            case WaitSite::token_arrival:
            case WaitSite::rank_barrier_before_combine:
            case WaitSite::combine_arrival:
            case WaitSite::rank_barrier_after_cleanup:
            case WaitSite::split_counts:
            case WaitSite::split_tokens:
            case WaitSite::split_contributions:
            case WaitSite::list_page:
                return limit_across_ranks;
            case WaitSite::l1_block_arrival:
            case WaitSite::rows_released:
                return limit_of_dispatch;
            default:
                return limit_behind_dispatch;
        }
    }

    struct Clock {
        uint64_t limit_ns;
        uint64_t started = 0;
        uint32_t polls = 0;
        __device__ bool time_to_check() { return ++polls % polls_between_checks == 0; }
    };

    template <class LateRanks>
    __device__ bool give_up(Clock& clock, WaitSite site, uint64_t expected, uint64_t seen,
                            const LateRanks& late_ranks) {
        const uint64_t now = ptx::globaltimer();
        if (clock.started == 0) clock.started = now;
        const uint64_t waited = now - clock.started;
        if (waited >= clock.limit_ns) {
            report(WaitCode::timeout, site, expected, seen, waited, late_ranks());
            aborted_ = true;
        } else if (waited >= quiet_ns) {
            aborted_ = ptx::ld_relaxed_sys(&status_->code) != static_cast<uint32_t>(WaitCode::ok);
            if (!aborted_) ptx::nanosleep(sleep_ns);
        }
        return aborted_;
    }

    // Host calls read while the kernel runs. They see the code after the fields that it stands for.
    __device__ void report(WaitCode code, WaitSite site, uint64_t expected, uint64_t seen,
                           uint64_t waited_ns, RankSet missing_ranks) const {
        const uint32_t first =
            ptx::atom_cas_relaxed_sys(&status_->code, static_cast<uint32_t>(WaitCode::ok),
                                      static_cast<uint32_t>(WaitCode::reporting));
        if (first != static_cast<uint32_t>(WaitCode::ok)) return;
        status_->site = static_cast<uint32_t>(site);
        status_->cta = blockIdx.x;
        status_->warp = threadIdx.x / warp_size;
        status_->peer_rank = missing_ranks.first();
        status_->expected = expected;
        status_->seen = seen;
        status_->waited_ns = waited_ns;
        status_->missing_ranks[0] = missing_ranks.low;
        status_->missing_ranks[1] = missing_ranks.high;
        ptx::fence_release_sys();
        ptx::st_relaxed_sys(&status_->code, static_cast<uint32_t>(code));
    }

    WaitStatus* const& status_;  // in the parameter, where it takes no registers meanwhile
    uint64_t timeout_ns_;
    bool aborted_ = false;
};

}  // namespace deep_moe
