"""Calls that add to what y holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens
from tests.everyday import parametrize

from .layer_case import LayerCase

SHAPE = MoEShape(
    num_ranks=2,
    num_experts=6,
    num_topk=2,
    hidden=256,
    intermediate_hidden=128,
    num_max_tokens_per_rank=96,
)
ARCHS = ("sm_90a", "sm_100a")


def numbers(shape: MoEShape, *counts: int) -> list[torch.Tensor]:
    """BF16 numbers of many sizes."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(n, shape.hidden, generator=generator) for n in counts]
    sizes = [torch.randint(-4, 12, y.shape, generator=generator) for y in made]
    return [(y * size.exp2()).bfloat16() for y, size in zip(made, sizes, strict=True)]


@parametrize("arch", ARCHS, everyday=["sm_90a"])
@parametrize(
    ("num_shared", "counts"), [(0, (40, 9)), (2, (1, 96)), (1, (0, 3))], everyday=[(2, (1, 96))]
)
def test_what_y_holds_is_added(arch: str, num_shared: int, counts: tuple[int, int]) -> None:
    """First, in float32 and with one rounding behind all: bit for bit as the reference has it.
    Tokens that name no expert keep their rows, and NaN stays in its own."""
    shape = replace(SHAPE, num_shared_experts=num_shared)
    case = LayerCase(shape, exact_layer(shape, seed=1), arch=arch)
    tokens = [exact_tokens(shape, n, seed=n) for n in counts]
    for own in tokens:
        own.topk_idx[1::5] = -1
    onto = numbers(shape, *counts)
    onto[1][2, 7] = torch.nan
    onto[0][1::5, :9] = -0.0
    one_kernel = {"expected_tokens_per_rank": max(counts)}
    for y, expected in zip(
        case.call(tokens, onto=onto, **one_kernel), case.expected(tokens, onto=onto), strict=True
    ):
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    case.check_control_words()
    if not num_shared:
        ys = case.call(tokens, onto=onto, **one_kernel)
        assert torch.equal(ys[0][1::5].view(torch.int16), onto[0][1::5].view(torch.int16))


@parametrize("arch", ARCHS, everyday=["sm_100a"])
def test_a_random_layer_on_top_of_y_is_within_bounds(arch: str) -> None:
    case = LayerCase(SHAPE, random_layer(SHAPE, seed=3), arch=arch)
    tokens = [random_tokens(SHAPE, n, seed=n, num_unused_slots=1) for n in (50, 21)]
    onto = numbers(SHAPE, 50, 21)
    ys, bounds = case.call(tokens, onto=onto), case.bounds(tokens, onto=onto)
    for y, bound, before in zip(ys, bounds, onto, strict=True):
        assert compare(y, bound).is_right
        assert not compare(y - before, bound).is_right


def test_y_needs_a_slot_of_its_own() -> None:
    """Of the 32 rows that combine adds for a token."""
    widest = replace(SHAPE, num_experts=32, num_topk=32)
    assert choose_config(replace(widest, num_topk=31), 8, accumulate=True).accumulate
    with pytest.raises(ValueError, match="accumulate must be False with 32 slots"):
        choose_config(widest, 8, accumulate=True)
    with pytest.raises(TypeError, match="accumulate must be a bool; got 1"):
        choose_config(SHAPE, 8, accumulate=1)  # type: ignore[arg-type]
