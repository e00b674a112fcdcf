"""Lists of more slots than a page has: whatever the routing, every slot gets to its expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deep_moe.jit.status import site_text
from deep_moe.targets import MegaMoEConfig

from .test_dispatch_and_combine import Call
from .test_many_tokens import COUNT_KERNEL

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule

SECOND = 1_000_000_000
NUM_TOKENS = 96  # of a rank at most, with as many slots as four pages have
PAGE, NUM_FURTHER = 96, 3


def paged_config(make_config: Any, *, arch: str = "sm_100a", **shape: Any) -> MegaMoEConfig:
    """16 experts on two ranks, whose lists have up to four pages."""
    sizes = {"num_sms": 4, "num_ranks": 2, "num_experts": 16, "num_topk": 4, "hidden": 128}
    config: MegaMoEConfig = make_config(NUM_TOKENS, arch=arch, **{**sizes, **shape})
    assert config.symm_buffer_layout["src_list_pages"].shape[-1] == NUM_FURTHER
    assert config.symm_buffer_layout["src_token_topk_idx"].shape[1] == PAGE
    return config


def route(ranks: Any, rank: int, routing: str, num_experts: int = 16) -> None:
    """What the slots of a rank name. Expert 3 is rank 0's, as those of the pairs are."""
    idx = ranks.segment(rank, "input_topk_idx")
    slots = np.arange(idx.size).reshape(idx.shape)
    spread = slots * 5 % num_experts
    idx[:] = {
        "one expert": np.full_like(slots, 3),
        "two experts": np.where(slots % 3 == 0, 5, 3),  # 128 and 256 slots
        "every rank": np.where(slots % 2 == 0, 3, 12),
        "one of every token": np.where(slots % 4 == 1, 3, spread),
        "a page and one": np.where(slots <= PAGE, 3, -1),
        "a page": np.where(slots < PAGE, 3, -1),
        "spread": spread,
        "nobody": np.full_like(slots, -1),
    }[routing]


def listed(ranks: Any, owner: int, local_expert: int, source: int) -> list[int]:
    """The list as its owner finds it."""
    count = int(ranks.segment(source, "expert_send_count")[owner * 8 + local_expert]) & 0xFFFFFFFF
    pages = [
        local_expert * 2 + source,
        *ranks.segment(owner, "src_list_pages")[local_expert, source],
    ]
    slots = ranks.segment(owner, "src_token_topk_idx")[pages].flatten()
    return slots[:count].tolist()


def count(ranks: Any, num_tokens: int = NUM_TOKENS, **options: Any) -> None:
    ranks.run(
        COUNT_KERNEL,
        num_threads=32 * ranks.config.num_dispatch_warps,
        num_tokens=[num_tokens, num_tokens],
        **options,
    )


@pytest.mark.parametrize(
    ("num_sms", "schedule"), [(1, "random"), (4, "random"), (9, "round_robin")]
)
@pytest.mark.parametrize("routing", ["one expert", "two experts", "every rank", "a page and one"])
def test_slots_are_listed_page_by_page(
    make_config: Any, make_ranks: Any, routing: str, num_sms: int, schedule: Schedule
) -> None:
    ranks = make_ranks(
        paged_config(make_config, arch="sm_90a", num_sms=num_sms), output_bytes=16, seed=num_sms
    )
    for rank in range(2):
        route(ranks, rank, routing)
    count(ranks, schedule=schedule)
    for source in range(2):
        idx = ranks.segment(source, "input_topk_idx").flatten()
        num_taken = [0, 0]
        for expert in range(16):
            owner, local_expert = divmod(expert, 8)
            slots = np.flatnonzero(idx == expert)
            assert sorted(listed(ranks, owner, local_expert, source)) == slots.tolist()
            num_pages = max(len(slots) - 1, 0) // PAGE
            num_taken[owner] += num_pages
            pages = ranks.segment(owner, "src_list_pages")[local_expert, source]
            first = 16 + source * NUM_FURTHER
            assert all(first <= page < first + NUM_FURTHER for page in pages[:num_pages])
            told = ranks.segment(source, "taken_pages")[expert].tolist()
            assert told == pages.tolist() == [*pages[:num_pages], *[0] * (3 - num_pages)]
        assert ranks.segment(source, "num_taken_pages").tolist() == num_taken


CALLS = (
    ("one expert", "spread"),
    ("every rank", "two experts"),
    ("one expert", "one expert"),
    ("a page", "a page and one"),
    ("nobody", "one of every token"),
    ("two experts", "every rank"),
)


@pytest.mark.parametrize("num_calls", [2, pytest.param(len(CALLS), marks=pytest.mark.slow)])
def test_calls_with_long_lists_follow_each_other(
    arch: str, make_config: Any, make_ranks: Any, num_calls: int
) -> None:
    config = paged_config(make_config)
    ranks = make_ranks(config, output_bytes=2 * NUM_TOKENS * config.hidden)
    for seed, routings in enumerate(CALLS[:num_calls]):
        num_tokens = [NUM_TOKENS, NUM_TOKENS - 7 * seed]
        call = Call(ranks, num_tokens, np.random.default_rng(seed))
        for rank, routing in enumerate(routings):
            route(ranks, rank, routing)
        call.run(arch)
        call.check_results()
        call.check_pools()


@pytest.mark.parametrize("alone", [True, False], ids=["counting", "whole call"])
def test_a_page_that_nobody_takes_stops_the_rank(
    make_config: Any, make_ranks: Any, alone: bool
) -> None:
    """As if a CTA had drawn the first place of the second page, and come no further."""
    config = paged_config(make_config)
    ranks = make_ranks(config, output_bytes=2 * NUM_TOKENS * config.hidden)
    call = Call(ranks, [30, 2], np.random.default_rng(0))
    for rank in range(2):
        route(ranks, rank, "one expert")
    ranks.segment(0, "expert_send_count")[3] = PAGE + 1
    if alone:
        count(ranks, 30, only=[0], timeout_ns=SECOND)
        status = ranks.statuses[0]
        words = "a page for a list of tokens, from another CTA of this rank"
        assert (status.code, site_text(status.site)) == (1, words)
        return
    call.run("sm_90a", timeout_ns=SECOND)
    first, second = ranks.statuses
    assert first.code == 1
    assert (second.code, list(second.missing_ranks)) == (1, [0b1, 0])
    for rank in range(2):
        assert (ranks.output(rank, np.uint16, 2, config.hidden) == 0xFFFF).all()


def test_a_rank_that_gave_up_lists_no_pages(make_config: Any, make_ranks: Any) -> None:
    """Its counts are those of the failed call, and lead out of the lists."""
    ranks = make_ranks(paged_config(make_config), output_bytes=16)
    for rank in range(2):
        route(ranks, rank, "one expert")
    counts = ranks.segment(0, "expert_send_count")
    counts[:] = 3 * PAGE
    counts[0] += np.uint64(1 << 63)
    count(ranks, only=[0])
    for rank in range(2):
        for name in ("src_list_pages", "src_token_topk_idx", "taken_pages"):
            assert not ranks.segment(rank, name).any(), name
