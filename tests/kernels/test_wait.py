"""Waits that do not end: who reports what, and that everybody else stops too."""

from __future__ import annotations

from typing import Any

import numpy as np

from deep_moe.jit.status import site_text
from tests.everyday import parametrize

# The emulator's clock leaps by up to 14 s while everybody polls, and a wait looks at it every 32
# polls: only limits of minutes show which wait comes first.
LIMIT_NS = 300_000_000_000

KERNEL = r"""
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/ptx/ld_st.cuh>
#include <deep_moe/ptx/mbarrier.cuh>
#include <deep_moe/sync/wait.cuh>

using namespace deep_moe;

// y: [0] a word that never becomes 7. [1] how many warps came out of their waits with false.
// CTA 0 waits for the word, CTA 1 for a barrier that nobody arrives on.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* words = static_cast<uint32_t*>(args.y);
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    __syncthreads();
    Waiter waiter(args);
    const auto poll = [&] { return ptx::ld_acquire_gpu(words); };
    // Three times each: after the first, the answer comes at once.
    for (uint32_t i = 0; i < 3; ++i) {
        const bool arrived =
            blockIdx.x == 0
                ? waiter.warp_until(WaitSite::l1_block_arrival, 7, poll)
                : waiter.warp_mbarrier(WaitSite::stage_full, ptx::shared_address(&barrier), 0);
        if (!arrived && waiter.aborted() && threadIdx.x % warp_size == 31) {
            atomicAdd(words + 1, 1);
        }
    }
}
"""


ORDER_KERNEL = r"""
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/ptx/ld_st.cuh>
#include <deep_moe/ptx/timer.cuh>
#include <deep_moe/sync/wait.cuh>

using namespace deep_moe;

// Both CTAs wait for a word that never becomes 7. CTA 1, which waits for the cause, begins a third
// of a limit later: others may have been in front of it when what depends on it waited already.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    const auto* word = static_cast<const uint32_t*>(args.y);
    const uint64_t began = ptx::globaltimer();
    while (blockIdx.x == 1 && ptx::globaltimer() - began < args.wait_timeout_ns / 3) {
        ptx::nanosleep(1'000'000);
    }
    Waiter waiter(args);
    waiter.warp_until(blockIdx.x == 1 ? WaitSite::CAUSE : WaitSite::DEPENDENT, 7,
                      [&] { return ptx::ld_acquire_gpu(word); });
}
"""


def test_the_first_wait_over_its_limit_reports_and_all_others_give_up(
    make_config: Any, make_ranks: Any
) -> None:
    ranks = make_ranks(make_config(), output_bytes=8)
    ranks.output(0, np.uint32, 2)[0] = 5
    ranks.run(KERNEL, num_threads=96, timeout_ns=LIMIT_NS)

    assert ranks.output(0, np.uint32, 2).tolist() == [5, 2 * 3 * 3]
    status = ranks.statuses[0]
    assert status.code == 1
    assert status.peer_rank == 0xFFFFFFFF
    # A wait for dispatch has twice the limit, what depends on it three times.
    assert 2 * LIMIT_NS <= status.waited_ns < 3 * LIMIT_NS
    assert site_text(status.site) == "tokens of a pool block, before Linear1 loads them"
    assert (status.expected, status.seen, status.cta) == (7, 5, 0)
    assert status.warp in range(3)


@parametrize(
    ("cause", "dependent"),
    [
        ("expert_counts", "l1_block_arrival"),
        ("token_arrival", "l1_block_arrival"),
        ("l1_block_arrival", "l2_block_arrival"),
        ("l1_block_arrival", "activation_stage_empty"),
        ("l1_block_arrival", "weight_stage_empty"),
        ("l1_block_arrival", "stage_full"),
        ("l1_block_arrival", "accumulator_empty"),
        ("l1_block_arrival", "accumulator_full"),
        ("l1_block_arrival", "block_header"),
    ],
    everyday=[
        ("expert_counts", "l1_block_arrival"),
        ("token_arrival", "l1_block_arrival"),
        ("l1_block_arrival", "l2_block_arrival"),
        ("l1_block_arrival", "stage_full"),
    ],
)
def test_a_wait_reports_before_those_that_depend_on_it(
    make_config: Any, make_ranks: Any, cause: str, dependent: str
) -> None:
    kernel = ORDER_KERNEL.replace("CAUSE", cause).replace("DEPENDENT", dependent)
    ranks = make_ranks(make_config(), output_bytes=4)
    ranks.run(kernel, timeout_ns=LIMIT_NS)
    assert (ranks.statuses[0].code, ranks.statuses[0].cta) == (1, 1)


def test_a_status_set_by_somebody_else_ends_all_waits_long_before_their_limit(
    make_config: Any, make_ranks: Any
) -> None:
    ranks = make_ranks(make_config(), output_bytes=8)
    ranks.statuses[0].code = 3
    ranks.run(KERNEL, num_threads=64)
    assert ranks.output(0, np.uint32, 2)[1] == 2 * 2 * 3
    status = ranks.statuses[0]
    assert (status.code, status.site, status.waited_ns) == (3, 0, 0)


def test_what_is_there_already_is_not_waited_for(make_config: Any, make_ranks: Any) -> None:
    ranks = make_ranks(make_config(), output_bytes=8)
    ranks.output(0, np.uint32, 2)[0] = 7
    kernel = KERNEL.replace("blockIdx.x == 0", "true")
    ranks.run(kernel, timeout_ns=0)
    assert ranks.statuses[0].code == 0
    assert ranks.output(0, np.uint32, 2)[1] == 0
