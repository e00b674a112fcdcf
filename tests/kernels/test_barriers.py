"""Gathers and rank barriers: nobody goes on early, and the words can be used again at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deep_moe.jit.status import missing_ranks, site_text
from tests.everyday import parametrize

NUM_ROUNDS = 5
SECOND = 1_000_000_000

GATHER_KERNEL = r"""
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/ptx/ld_st.cuh>
#include <deep_moe/sync/grid_gather.cuh>

using namespace deep_moe;

// y: a step per CTA, the round that the last CTA has told the others to go on from, and the number
// of steps that it saw too early.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* steps = static_cast<uint32_t*>(args.y);
    uint32_t* told = steps + Config::num_sms;
    uint32_t* num_early = told + 1;
    uint32_t* counter = RankBuffers<Config>(args).local().grid_gather_counter();
    Waiter waiter(args);
    for (uint32_t round = 1; round <= NUM_ROUNDS; ++round) {
        if (threadIdx.x == 0) steps[blockIdx.x] = round;
        __syncwarp();
        if (grid_gather<Config::num_sms>(counter, waiter)) {
            // Every lane looks, though lane 0 alone came to the gather.
            for (uint32_t i = threadIdx.x; i < Config::num_sms; i += warp_size) {
                if (steps[i] != round) atomicAdd(num_early, 1);
            }
            __syncwarp();
            if (threadIdx.x == 0) ptx::red_add_release_gpu(told, 1);
        }
        waiter.warp_until(WaitSite::expert_counts, round,
                          [&] { return ptx::ld_acquire_gpu(told); });
    }
}
""".replace("NUM_ROUNDS", str(NUM_ROUNDS))

# In the first call CTA 1 gives up, which the others do not hear of.
GIVES_UP_KERNEL = r"""
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/sync/grid_gather.cuh>

using namespace deep_moe;

// y: [0] how many CTAs were the last, [1] the number of the call.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* words = static_cast<uint32_t*>(args.y);
    uint32_t* counter = RankBuffers<Config>(args).local().grid_gather_counter();
    Waiter waiter(args);
    if (words[1] == 0 && blockIdx.x == 1) {
        if (threadIdx.x == 0) waiter.fail(WaitCode::timeout, WaitSite::stage_full, 1, 0);
        waiter.warp_agrees(!waiter.aborted());
    }
    const bool is_last = grid_gather<Config::num_sms>(counter, waiter);
    if (is_last && threadIdx.x == 0) atomicAdd(words, 1);
    if (waiter.aborted() && threadIdx.x == 0) end_gathers(counter);
}
"""

RANK_KERNEL = r"""
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/sync/grid_gather.cuh>
#include <deep_moe/sync/rank_barrier.cuh>

using namespace deep_moe;

// y: the number of peers' writes that some CTA missed. Every CTA writes to every rank, so that the
// release in the last CTA has to cover what other CTAs wrote.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* num_missed = static_cast<uint32_t*>(args.y);
    const RankBuffers<Config> buffers(args);
    const CallRanks<Config> ranks = buffers.active_ranks();
    uint32_t* counter = buffers.local().grid_gather_counter();
    const uint32_t column = buffers.rank_idx() * Config::num_sms + blockIdx.x;
    Waiter waiter(args);
    for (uint32_t round = 1; round <= NUM_ROUNDS; ++round) {
        for (uint32_t rank = threadIdx.x; rank < Config::num_ranks; rank += warp_size) {
            ptx::st_relaxed_sys(buffers.of(rank).l1_arrival_count(column), round);
        }
        __syncwarp();
        const RankBarrier<Config> barrier(buffers, ranks, round - 1);
        const bool is_last = grid_gather<Config::num_sms>(counter, waiter);
        if (is_last) barrier.arrive();
        barrier.wait(WaitSite::rank_barrier_before_combine, is_last, waiter);
        for (uint32_t i = threadIdx.x; i < Config::num_ranks * Config::num_sms; i += warp_size) {
            const uint32_t seen = ptx::ld_relaxed_sys(buffers.local().l1_arrival_count(i));
            if (seen < round || seen > round + 1) atomicAdd(num_missed, 1);
        }
        __syncwarp();
    }
}
""".replace("NUM_ROUNDS", str(NUM_ROUNDS))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_sms", [2, 6])
def test_the_last_cta_goes_on_when_all_have_come_and_no_other_does(
    make_config: Any, make_ranks: Any, num_sms: int, seed: int
) -> None:
    ranks = make_ranks(make_config(num_sms=num_sms), output_bytes=4 * num_sms + 8, seed=seed)
    ranks.run(GATHER_KERNEL)
    words = ranks.output(0, np.uint32, num_sms + 2).tolist()
    assert words == [NUM_ROUNDS] * num_sms + [NUM_ROUNDS, 0]
    assert ranks.segment(0, "grid_gather_counter") == 0


def test_no_cta_is_the_last_of_a_rank_that_gave_up(make_config: Any, make_ranks: Any) -> None:
    """Nor in a call behind it, whatever the first one left in the counter."""
    num_sms = 4
    ranks = make_ranks(make_config(num_sms=num_sms), output_bytes=8)
    for call in range(3):
        ranks.output(0, np.uint32, 2)[1] = call
        ranks.run(GIVES_UP_KERNEL)
        assert ranks.output(0, np.uint32, 2)[0] == 0
    ranks.segment(0, "grid_gather_counter")[:] = 0
    ranks.run(GIVES_UP_KERNEL)
    assert ranks.output(0, np.uint32, 2)[0] == 1


@parametrize("seed", [0, 1, 2], everyday=[0])
@pytest.mark.parametrize(("num_ranks", "num_sms"), [(1, 2), (2, 4), (3, 2), (33, 2)])
def test_no_rank_passes_the_rank_barrier_before_all_have_arrived(
    make_config: Any, make_ranks: Any, num_ranks: int, num_sms: int, seed: int
) -> None:
    config = make_config(num_ranks=num_ranks, num_experts=num_ranks, num_topk=1, num_sms=num_sms)
    ranks = make_ranks(config, output_bytes=4, seed=seed)
    ranks.run(RANK_KERNEL)
    for rank in range(num_ranks):
        assert ranks.output(rank, np.uint32, 1) == 0
        assert ranks.segment(rank, "rank_barrier_counter") == NUM_ROUNDS
        # Rounds 0 and 1 count up, 2 and 3 down, 4 up again.
        assert ranks.segment(rank, "rank_barrier_signals").tolist() == [num_ranks, 0]


@pytest.mark.parametrize(("num_ranks", "present"), [(4, [0, 2]), (70, [0, 66])])
def test_ranks_that_never_arrive_are_named_by_those_that_wait(
    make_config: Any, make_ranks: Any, num_ranks: int, present: list[int]
) -> None:
    config = make_config(num_ranks=num_ranks, num_experts=num_ranks, num_topk=1)
    ranks = make_ranks(config, output_bytes=4)
    ranks.run(RANK_KERNEL, only=present, timeout_ns=SECOND)
    for rank in present:
        status = ranks.statuses[rank]
        assert status.code == 1
        assert site_text(status.site) == "rank barrier before combine"
        assert (status.expected, status.seen, status.peer_rank) == (num_ranks, len(present), 1)
        assert missing_ranks(status) == sorted(set(range(num_ranks)) - set(present))


def test_a_rank_with_a_cta_missing_names_itself(make_config: Any, make_ranks: Any) -> None:
    """CTA 1 of rank 1 never comes: the others have a longer limit than their peers."""
    config = make_config(num_ranks=2, num_experts=2, num_topk=1)
    ranks = make_ranks(config, output_bytes=4)
    leaves = "    if (args.rank_idx == 1 && blockIdx.x == 1) return;\n    for (uint32_t round"
    kernel = RANK_KERNEL.replace("    for (uint32_t round", leaves, 1)
    ranks.run(kernel, timeout_ns=SECOND)
    for rank, limit in ((0, SECOND), (1, 4 * SECOND)):
        status = ranks.statuses[rank]
        assert status.code == 1
        assert status.waited_ns >= limit
        assert list(status.missing_ranks) == [0b10, 0]
