"""Grid and rank barriers: nobody passes early, and the words can be used again at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deep_moe.jit.status import site_text

NUM_ROUNDS = 5
SECOND = 1_000_000_000

GRID_KERNEL = r"""
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/sync/grid_barrier.cuh>

using namespace deep_moe;

// y: a step per CTA, and the number of steps that some CTA saw too early.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* steps = static_cast<uint32_t*>(args.y);
    uint32_t* num_early = steps + Config::num_sms;
    uint32_t* counter = RankBuffers<Config>(args).local().grid_sync_counter();
    Waiter waiter(args);
    for (uint32_t round = 1; round <= NUM_ROUNDS; ++round) {
        if (threadIdx.x == 0) ptx::st_relaxed_sys(steps + blockIdx.x, round);
        __syncwarp();
        grid_barrier<Config::num_sms>(WaitSite::grid_barrier_combine, counter, blockIdx.x, waiter);
        // Every lane looks, though lane 0 alone went through the barrier.
        for (uint32_t i = threadIdx.x; i < Config::num_sms; i += warp_size) {
            const uint32_t step = ptx::ld_relaxed_gpu(steps + i);
            if (step < round || step > round + 1) atomicAdd(num_early, 1);
        }
        __syncwarp();
    }
}
""".replace("NUM_ROUNDS", str(NUM_ROUNDS))

RANK_KERNEL = r"""
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/sync/grid_barrier.cuh>
#include <deep_moe/sync/rank_barrier.cuh>

using namespace deep_moe;

// y: the number of peers' writes that some CTA missed. Every CTA writes to every rank, so that the
// release in CTA 0 has to cover what other CTAs wrote.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* num_missed = static_cast<uint32_t*>(args.y);
    const RankBuffers<Config> buffers(args);
    uint32_t* counter = buffers.local().grid_sync_counter();
    const uint32_t column = buffers.rank_idx() * Config::num_sms + blockIdx.x;
    Waiter waiter(args);
    for (uint32_t round = 1; round <= NUM_ROUNDS; ++round) {
        for (uint32_t rank = threadIdx.x; rank < Config::num_ranks; rank += warp_size) {
            ptx::st_relaxed_sys(buffers.of(rank).l1_arrival_count(column), round);
        }
        __syncwarp();
        grid_barrier<Config::num_sms>(WaitSite::grid_barrier_before_combine, counter, blockIdx.x,
                                      waiter);
        if (blockIdx.x == 0) rank_barrier(WaitSite::rank_barrier_before_combine, buffers, waiter);
        grid_barrier<Config::num_sms>(WaitSite::grid_barrier_combine, counter, blockIdx.x, waiter);
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
def test_no_cta_passes_the_grid_barrier_before_all_have_arrived(
    make_config: Any, make_ranks: Any, num_sms: int, seed: int
) -> None:
    ranks = make_ranks(make_config(num_sms=num_sms), output_bytes=4 * num_sms + 4, seed=seed)
    ranks.run(GRID_KERNEL)
    words = ranks.output(0, np.uint32, num_sms + 1).tolist()
    assert words == [NUM_ROUNDS] * num_sms + [0]
    # Five completed phases: bit 31 set, no arrivals left over.
    assert ranks.segment(0, "grid_sync_counters")[0] == 0x80000000


@pytest.mark.parametrize("seed", [0, 1, 2])
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


def test_ranks_that_never_arrive_are_named_by_those_that_wait(
    make_config: Any, make_ranks: Any
) -> None:
    config = make_config(num_ranks=4, num_experts=4, num_topk=1)
    ranks = make_ranks(config, output_bytes=4)
    ranks.run(RANK_KERNEL, only=[0, 2], timeout_ns=SECOND)
    for rank in (0, 2):
        status = ranks.statuses[rank]
        assert (status.code, status.cta) == (1, 0)
        assert site_text(status.site) == "rank barrier before combine"
        assert (status.expected, status.seen, status.peer_rank) == (4, 2, 1)
        assert list(status.missing_ranks) == [0b1010, 0]
