"""Calls that bring several times as many tokens as the pool has rows, so that rows are used again
and again: results, order and what is left behind are those of a pool in which each token has its
own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.heuristics import MoEShape
from deep_moe.targets import TARGETS, choose_config
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.everyday import parametrize

from .layer_case import LayerCase

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule
    from deep_moe.trial.synthetic import Tokens

NUM_SMS = 4
SMALLEST = 384  # rows
TILES = {
    "sm_90a": (
        {"block_m": 8},  # a warp of its own publishes and releases
        {"block_m": 64, "num_stages": 3},
        {"block_m": 168},  # two m-blocks in the ring
        {"block_m": 128, "block_m_step": 32, "num_stages": 3},
        {"block_m": 64, "block_m_step": 8},
    ),
    "sm_100a": (
        {"block_m": 16},  # the ring is as long as its scale columns
        {"block_m": 96, "num_stages": 3},
        {"block_m": 192},  # two m-blocks in the ring
    ),
    "sm_103a": ({"block_m": 96},),
}
CASES = [(arch, tile) for arch, tiles in TILES.items() for tile in tiles]


def shape_of(num_tokens: tuple[int, int], *, biases: bool = False) -> MoEShape:
    """An odd number of Linear2 blocks, so that SM100's last pair is half empty."""
    return MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=3,
        hidden=384,
        intermediate_hidden=256,
        num_max_tokens_per_rank=max(num_tokens),
        num_pool_tokens=SMALLEST,
        biases=biases,
    )


def check_calls(
    arch: str,
    overrides: dict[str, int],
    calls: list[list[Tokens]],
    shape: MoEShape,
    schedule: Schedule,
) -> None:
    config = choose_config(
        shape,
        shape.num_max_tokens_per_rank,
        arch=arch,
        num_sms=NUM_SMS,
        overrides=overrides,
    )
    assert config.pool_wraps
    case = LayerCase(shape, exact_layer(shape, seed=1), arch=arch)
    for call_idx, tokens in enumerate(calls):
        comparisons = case.compare_call(
            tokens,
            num_sms=NUM_SMS,
            overrides=overrides,
            schedule=schedule,
            schedule_seed=call_idx,
        )
        case.check_control_words()
        for comparison in comparisons:
            assert comparison.is_exact, comparison


def test_every_target_has_tiles() -> None:
    assert TILES.keys() == TARGETS.keys()


@parametrize(
    ("arch", "overrides"),
    CASES,
    everyday=[(arch, TILES[arch][0]) for arch in ("sm_90a", "sm_100a")],
)
def test_two_calls(arch: str, overrides: dict[str, int]) -> None:
    num_tokens = (200, 170)
    shape = shape_of(num_tokens)
    calls = [
        [exact_tokens(shape, n, seed=10 * call + rank) for rank, n in enumerate(num_tokens)]
        for call in range(2)
    ]
    check_calls(arch, overrides, calls, shape, "random")


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "overrides"), CASES)
def test_all_to_one_expert(arch: str, overrides: dict[str, int]) -> None:
    """Every slot of every token, and then a call that uses no row twice."""
    num_tokens = (100, 90)
    shape = shape_of(num_tokens)
    many = [exact_tokens(shape, n, seed=rank) for rank, n in enumerate(num_tokens)]
    for tokens in many:
        tokens.topk_idx[:] = 2
    few = [exact_tokens(shape, n, seed=5 + rank) for rank, n in enumerate((3, 0))]
    check_calls(arch, overrides, [many, few, many], shape, "random")


@parametrize("biases", [False, True], everyday=[False])
@parametrize("schedule", SCHEDULES, everyday=["random"])
def test_a_small_ring(arch: str, schedule: Schedule, biases: bool) -> None:
    """One call in which every wait for rows matters. With biases, Linear2's epilogues read routing
    weights in rows that they release."""
    overrides = {"sm_90a": {"block_m": 64, "num_stages": 3}, "sm_100a": {"block_m": 96}}[arch]
    num_tokens = (200, 170)
    shape = shape_of(num_tokens, biases=biases)
    tokens = [exact_tokens(shape, n, seed=rank) for rank, n in enumerate(num_tokens)]
    check_calls(arch, overrides, [tokens], shape, schedule)


@parametrize("schedule", SCHEDULES, everyday=["random"])
def test_one_rank_with_small_blocks(arch: str, schedule: Schedule) -> None:
    """Linear1's epilogues read routing weights in rows that Linear2's release."""
    shape = MoEShape(1, 4, 2, 256, 256, 192, SMALLEST)
    calls = [[exact_tokens(shape, 191, seed=call)] for call in range(2)]
    overrides = {"sm_90a": {"block_m": 8}, "sm_100a": {"block_m": 16, "num_stages": 5}}[arch]
    check_calls(arch, overrides, calls, shape, schedule)
