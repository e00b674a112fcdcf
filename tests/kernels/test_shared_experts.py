"""Shared experts: every token goes to them beside its slots, on its own rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.heuristics import MoEShape
from deep_moe.targets import TARGETS, target_of
from deep_moe.trial.synthetic import (
    Tokens,
    exact_layer,
    exact_tokens,
    name_twice,
    put_nan,
    random_layer,
    random_tokens,
)
from tests.everyday import parametrize

from .layer_case import FITTED, LayerCase

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule

SHAPE = MoEShape(
    num_ranks=2,
    num_experts=6,
    num_topk=2,
    hidden=256,
    intermediate_hidden=128,
    num_max_tokens_per_rank=96,
    num_shared_experts=1,
)
ARCHS = ("sm_90a", "sm_100a")


def make_case(arch: str, **changes: Any) -> LayerCase:
    shape = replace(SHAPE, **changes)
    return LayerCase(shape, exact_layer(shape, seed=1), arch=arch)


def make_tokens(shape: MoEShape, *counts: int, seed: int = 0) -> list[Tokens]:
    return [exact_tokens(shape, n, seed=seed + rank) for rank, n in enumerate(counts)]


def check(case: LayerCase, tokens: list[Tokens], **options: Any) -> None:
    most = max(own.num_tokens for own in tokens)  # said, so that all ranks run one kernel
    ys = case.call(tokens, expected_tokens_per_rank=most, **options)
    for y, expected in zip(ys, case.expected(tokens), strict=True):
        assert torch.equal(y, expected)
    case.check_control_words()


@pytest.mark.parametrize("arch", ARCHS)
@parametrize("num_shared", [1, 2, 4], everyday=[2])
@pytest.mark.parametrize("counts", [(40, 96), (1, 0), (0, 0)])
def test_shared_experts_are_added(arch: str, num_shared: int, counts: tuple[int, int]) -> None:
    case = make_case(arch, num_shared_experts=num_shared)
    check(case, make_tokens(case.shape, *counts))


TILES = {
    "sm_90a": ({"block_m": 8}, {"block_m": 64, "block_m_step": 8}, FITTED),
    "sm_100a": ({"block_m": 16}, {"block_m": 64}),
    "sm_103a": ({"block_m": 32},),
}
CASES = [(arch, tile) for arch, tiles in TILES.items() for tile in tiles]


def test_every_target_has_tiles() -> None:
    assert TILES.keys() == TARGETS.keys()


# Every tile with both pools, and with parts of one expert in one and of two in the other.
PARTS = [
    (arch, tile, num_pool_tokens, 1 + (i + has_ring) % 2)
    for i, (arch, tile) in enumerate(CASES)
    for has_ring, num_pool_tokens in enumerate((None, 384))
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "tile", "num_pool_tokens", "num_experts_per_part"), PARTS)
def test_parts_between_experts(
    arch: str, tile: dict[str, int], num_pool_tokens: int | None, num_experts_per_part: int
) -> None:
    """Several parts of several m-blocks, the last ones empty or not full, in turns that
    do not end where parts do; two calls, the second with other counts."""
    case = make_case(
        arch,
        num_shared_experts=3,
        num_max_tokens_per_rank=200,
        num_pool_tokens=num_pool_tokens,
    )
    overrides = {
        **tile,
        "num_experts_per_part": num_experts_per_part,
        "num_part_m_blocks": 1,
        "num_turn_m_blocks": 1,
        "num_stages": 4,
    }
    for counts in ((200, 137), (0, 150)):
        check(case, make_tokens(case.shape, *counts), overrides=overrides, num_sms=4)


@parametrize(
    ("schedule", "arch"),
    product(SCHEDULES, ARCHS),
    everyday=[(schedule, ARCHS[i % 2]) for i, schedule in enumerate(SCHEDULES)],
)
def test_the_smallest_ring(arch: str, schedule: Schedule) -> None:
    """Shared experts alone have more rows than the ring: their tokens, pulled before any count is
    there, wait for blocks that wait for counts."""
    case = make_case(
        arch,
        num_experts=2,
        num_shared_experts=4,
        num_max_tokens_per_rank=150,
        num_pool_tokens=384,
    )
    overrides = {"sm_90a": {"block_m": 64, "num_stages": 3}, "sm_100a": {"block_m": 96}}[arch]
    check(
        case, make_tokens(case.shape, 150, 130), overrides=overrides, num_sms=4, schedule=schedule
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_slots_that_name_nobody(arch: str) -> None:
    """Shared experts have tokens that no routed expert has, and one routed expert has all others.
    An id behind the last routed expert is nobody's, though weights stand there."""
    case = make_case(arch)
    first, second = make_tokens(case.shape, 30, 30)
    first.topk_idx[:] = -1
    second.topk_idx[:] = 3
    check(case, [first, second])
    second.topk_idx[0] = case.shape.num_experts
    check(case, [first, second], checked=False)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_token_with_nan_spoils_no_other(arch: str) -> None:
    case = make_case(arch, num_shared_experts=2)
    tokens = [put_nan(name_twice(own), 2) for own in make_tokens(case.shape, 33, 20)]
    ys = case.call(tokens, expected_tokens_per_rank=SHAPE.num_max_tokens_per_rank)
    for y, expected in zip(ys, case.expected(tokens), strict=True):
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "num_pool_tokens"), [(ARCHS[0], None), (ARCHS[1], 384)])
def test_calls_in_a_row(arch: str, num_pool_tokens: int | None) -> None:
    """With no look at the other rank in between. Shared experts are not counted."""
    case = make_case(arch, num_max_tokens_per_rank=250, num_pool_tokens=num_pool_tokens)
    calls = [
        make_tokens(case.shape, *counts, seed=10 * idx)
        for idx, counts in enumerate(((20, 0), (3, 250), (0, 0), (64, 65)))
    ]
    for comparisons in case.compare_calls_in_a_row(calls, num_sms=(4, 6)):
        assert all(comparison.is_exact for comparison in comparisons)


@pytest.mark.parametrize("arch", ARCHS)
def test_random_layer_within_bounds(arch: str) -> None:
    shape = replace(SHAPE, num_shared_experts=2)
    case = LayerCase(shape, random_layer(shape, seed=3), arch=arch)
    tokens = [random_tokens(shape, n, seed=n, num_unused_slots=1) for n in (50, 21)]
    for comparison in case.compare_call(tokens, activation_clamp=10.0):
        assert comparison.is_right, comparison


@pytest.mark.parametrize("arch", ARCHS)
def test_fp8(arch: str) -> None:
    shape = replace(SHAPE, num_shared_experts=2, weights="fp8")
    scale_block = target_of(arch).weights_of("fp8").scale_block
    case = LayerCase(shape, exact_layer(shape, seed=2, scale_block=scale_block), arch=arch)
    check(case, make_tokens(shape, 40, 90))
