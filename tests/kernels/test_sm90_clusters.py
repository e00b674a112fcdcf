"""SM90 kernels in clusters of two CTAs that share copies of weights: exact layers bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.errors import MegaMoETimeoutError
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config, target_of
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.everyday import parametrize

from .layer_case import FITTED, LayerCase

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule

# Overrides. With so few stages their ring comes round inside a block.
CLUSTERS = {"cluster_size": 2, "num_stages": 3}


def case_of(weights: str, num_tokens: tuple[int, ...], **sizes: int) -> LayerCase:
    """Tokens of each rank. By default n-blocks are even in number, or odd: see `ODD`."""
    defaults = {"num_experts": 4, "num_topk": 3, "hidden": 384, "intermediate_hidden": 256}
    shape = MoEShape(
        num_ranks=len(num_tokens),
        num_max_tokens_per_rank=max(num_tokens),
        weights=weights,
        **{**defaults, **sizes},
    )
    scale_block = target_of("sm_90a").weights_of(weights).scale_block
    return LayerCase(shape, exact_layer(shape, scale_block=scale_block), arch="sm_90a")


# Three n-blocks in both layers: the CTAs that have the fourth store nothing.
ODD = {"hidden": 768, "intermediate_hidden": 384}


def check(case: LayerCase, num_tokens: tuple[int, ...], **options: Any) -> None:
    tokens = [exact_tokens(case.shape, n, seed=n + rank) for rank, n in enumerate(num_tokens)]
    results = case.compare_call(tokens, num_sms=4, **options)
    case.check_control_words()
    assert all(result.is_exact for result in results), results


@parametrize(
    ("weights", "tile"),
    [
        ("fp8", {"block_m": 8}),
        ("fp8", {"block_m": 40}),
        ("bf16", {"block_m": 24}),
        ("mxfp4", FITTED),
    ],
    everyday=[("fp8", {"block_m": 40})],
)
@pytest.mark.parametrize("sizes", [{}, ODD], ids=["even", "odd"])
def test_even_and_odd_numbers_of_blocks(
    weights: str, tile: dict[str, int], sizes: dict[str, int]
) -> None:
    """Experts have one m-block, two or more."""
    num_tokens = (67, 30)
    check(case_of(weights, num_tokens, **sizes), num_tokens, overrides={**CLUSTERS, **tile})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("turn", [1, 3])
def test_uneven_experts_by_turns(schedule: Schedule, turn: int) -> None:
    """One expert has most tokens, and one none."""
    num_tokens = (61, 90)
    case = case_of("fp8", num_tokens)
    tokens = [exact_tokens(case.shape, n, seed=n) for n in num_tokens]
    for own in tokens:
        own.topk_idx[own.topk_idx == 1] = -1
        own.topk_idx[~(own.topk_idx == 2).any(dim=1), 0] = 2
    overrides = {
        **CLUSTERS,
        "block_m": 24,
        "num_turn_m_blocks": turn,
        "num_lead_m_blocks": turn + 1,
        "num_unit_m_blocks": 2,
    }
    results = case.compare_call(tokens, num_sms=6, overrides=overrides, schedule=schedule)
    assert all(result.is_exact for result in results), results


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_small_ring(schedule: Schedule) -> None:
    """Turns of one m-block, which end between two that a cluster has together. Rows are used
    again while CTAs still have blocks of them whose results nobody waits for."""
    num_tokens = (190,)
    case = case_of(
        "fp8", num_tokens, num_experts=3, hidden=128, intermediate_hidden=640, num_pool_tokens=384
    )
    overrides = {**CLUSTERS, "block_m": 16, "num_turn_m_blocks": 1}
    # With either seed a CTA is late enough, in most schedules, to notice rows used too early.
    for seed in (0, 2):
        check(case, num_tokens, overrides=overrides, schedule=schedule, schedule_seed=seed)


def test_calls_in_a_row() -> None:
    case = case_of("fp8", (40, 50))
    calls = [
        [exact_tokens(case.shape, n, seed=10 * i + n) for n in counts]
        for i, counts in enumerate([(40, 5), (0, 1), (33, 50)])
    ]
    overrides = {**CLUSTERS, "block_m": 16}
    for of_call in case.compare_calls_in_a_row(calls, num_sms=(4, 2), overrides=overrides):
        assert all(result.is_exact for result in of_call), of_call


def test_every_role_leaves_wherever_it_stands() -> None:
    """Limits so short that healthy waits exceed them, here and there: the call is right or raises,
    and no CTA is gone while the other one of its cluster reaches into it."""
    case = case_of("fp8", (60, 60))
    tokens = [exact_tokens(case.shape, 60, seed=rank) for rank in range(2)]
    overrides = {**CLUSTERS, "block_m": 16}
    num_aborted = 0
    for schedule_seed in range(16):
        try:
            results = case.compare_call(
                tokens,
                overrides=overrides,
                timeout_s=10 ** (-5.5 + schedule_seed / 12),
                schedule_seed=schedule_seed,
            )
            assert all(result.is_exact for result in results), (schedule_seed, results)
        except MegaMoETimeoutError:
            num_aborted += 1
            case.ranks.reset()
    assert num_aborted >= 3
    results = case.compare_call(tokens, overrides=overrides)
    assert all(result.is_exact for result in results), results


@pytest.mark.parametrize("pool_block_idx", range(3))
def test_tokens_that_never_come_are_named(pool_block_idx: int) -> None:
    """Those of either m-block that a cluster has, or of one by itself: not who waits for whom."""
    num_tokens = 40
    case = case_of("fp8", (num_tokens,), num_experts=2, num_topk=2)
    tokens = [exact_tokens(case.shape, num_tokens, seed=1)]
    overrides = {**CLUSTERS, "block_m": 16}
    buffer = case.ranks.buffers[0]
    counts = buffer.layout["l1_arrival_count"]
    words = buffer.memory.tensor[counts.offset : counts.end].view(torch.int32)
    words[pool_block_idx] += 1 << 20
    # Far more than the emulator's clock leaps between two looks at it.
    with pytest.raises(
        MegaMoETimeoutError, match="for tokens of a pool block, before Linear1 loads them:"
    ):
        case.call(tokens, timeout_s=400.0, overrides=overrides)
    case.ranks.reset()
    (result,) = case.compare_call(tokens, overrides=overrides)
    assert result.is_exact, result


def test_the_config_of_clusters() -> None:
    shape = case_of("fp8", (1,)).shape
    config = choose_config(shape, 1, arch="sm_90a", overrides={"cluster_size": 2})
    assert config.num_cluster_m_blocks == 2
    assert "claim_barriers" in [segment.name for segment in config.smem_layout.segments]
    alone = choose_config(shape, 1, arch="sm_90a")
    assert (alone.cluster_size, alone.num_cluster_m_blocks) == (1, 1)
    assert "claim_barriers" not in [segment.name for segment in alone.smem_layout.segments]
    with pytest.raises(ValueError, match="cluster_size must be 1 or 2; got 4"):
        choose_config(shape, 1, arch="sm_90a", overrides={"cluster_size": 4})
    with pytest.raises(ValueError, match="num_sms must be even with cluster_size 2; got 5"):
        choose_config(shape, 1, arch="sm_90a", num_sms=5, overrides={"cluster_size": 2})
