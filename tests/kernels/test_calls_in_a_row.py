"""Calls that each rank begins as soon as its last one has ended, wherever the other ranks are, and
with other inputs each time: what a rank that is ahead does must not disturb those behind it."""

from __future__ import annotations

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES, Schedule
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens

from .layer_case import LayerCase

MAX_TOKENS = 12
# Tokens of ranks 0, 1, 2 in each call. More calls than the barriers have phases; few tokens after
# many, none at all, and ranks that are idle while others are not.
COUNTS = ((12, 3, 7), (1, 0, 0), (0, 12, 1), (0, 0, 0), (5, 5, 12), (0, 1, 2))


def make_calls(shape: MoEShape, seed: int) -> list[list[Tokens]]:
    """Other tokens with another routing for each call and rank."""
    return [
        [
            exact_tokens(
                shape,
                counts[rank],
                seed=97 * seed + 5 * call_idx + rank,
                num_unused_slots=call_idx % 2,
            )
            for rank in range(shape.num_ranks)
        ]
        for call_idx, counts in enumerate(COUNTS)
    ]


def check(
    arch: str,
    num_ranks: int,
    schedule: Schedule,
    seed: int,
    *,
    num_sms: tuple[int, ...] = (2,),
) -> None:
    shape = MoEShape(
        num_ranks=num_ranks,
        num_experts=2 * num_ranks,
        num_topk=2,
        hidden=128,
        intermediate_hidden=128,
        num_max_tokens_per_rank=MAX_TOKENS,
    )
    case = LayerCase(shape, exact_layer(shape), arch=arch)
    results = case.compare_calls_in_a_row(
        make_calls(shape, seed),
        num_sms=num_sms,
        overrides={"block_m": 16},
        schedule=schedule,
        schedule_seed=seed,
    )
    for call_idx, of_ranks in enumerate(results):
        assert all(result.is_exact for result in of_ranks), (call_idx, of_ranks)
    for buffer in case.ranks.buffers:
        segment = buffer.layout["rank_barrier_counter"]
        counter = buffer.memory.tensor[segment.offset : segment.end].view(torch.int32)
        assert counter.tolist() == [2 * len(COUNTS)]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_calls_in_a_row(arch: str, num_ranks: int, schedule: Schedule) -> None:
    for seed in range(2):
        check(arch, num_ranks, schedule, seed)


def test_calls_in_a_row_of_one_rank(arch: str) -> None:
    check(arch, 1, "random", 0)


def test_calls_with_other_numbers_of_ctas(arch: str) -> None:
    check(arch, 2, "slow_rank", 1, num_sms=(2, 6, 4))
