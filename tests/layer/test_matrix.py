"""Whole layers on several emulated ranks, over the sizes and routings that a call may have.

Exact layers are compared bit for bit. tests/kernels holds what a single rank shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens, random_layer, random_tokens
from tests.everyday import parametrize
from tests.kernels.layer_case import LayerCase

TILES = (16, 32, 64, 96, 128, 192)
UNEQUAL_COUNTS = (17, 0, 1, 64, 5, 33, 0, 12)


def make_shape(num_ranks: int, max_tokens: int, **sizes: int) -> MoEShape:
    defaults: dict[str, Any] = {
        "num_experts": 2 * num_ranks,
        "num_topk": 2,
        "hidden": 256,
        "intermediate_hidden": 128,
    }
    return MoEShape(
        num_ranks=num_ranks, num_max_tokens_per_rank=max_tokens, **{**defaults, **sizes}
    )


def received(shape: MoEShape, tokens: list[Tokens]) -> torch.Tensor:
    """Tokens that each expert of the layer is sent."""
    named = torch.cat([own.topk_idx.flatten() for own in tokens])
    return torch.bincount(named[named >= 0], minlength=shape.num_experts).int()


def check_exact(shape: MoEShape, tokens: list[Tokens], **options: Any) -> None:
    """One call: every rank's output bit for bit, and the tokens that its experts received."""
    case = LayerCase(shape, exact_layer(shape))
    stats = [torch.zeros(shape.num_experts_per_rank, dtype=torch.int32) for _ in tokens]
    results = case.compare_call(tokens, stats=stats, **options)
    assert all(result.is_exact for result in results), results
    assert torch.equal(torch.cat(stats), received(shape, tokens))


@parametrize("num_ranks", [1, 2, 3, 4, 8], everyday=[1, 2, 3], ids=lambda n: f"{n}_ranks")
def test_ranks_with_unequal_tokens(num_ranks: int):
    counts = UNEQUAL_COUNTS[:num_ranks]
    shape = make_shape(num_ranks, max(counts))
    check_exact(shape, [exact_tokens(shape, n, seed=rank) for rank, n in enumerate(counts)])


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(300, 0), (123, 257)], ids=str)
def test_hundreds_of_tokens(counts: tuple[int, ...]):
    shape = make_shape(2, 300)
    check_exact(shape, [exact_tokens(shape, n, seed=n) for n in counts])


@parametrize("num_topk", range(1, 9), everyday=[1, 8])
def test_every_topk(num_topk: int):
    shape = make_shape(2, 9, num_experts=8, num_topk=num_topk, hidden=128)
    tokens = [exact_tokens(shape, n, seed=n) for n in (9, 4)]
    check_exact(shape, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("block_m", TILES)
def test_every_tile_between_ranks(block_m: int):
    shape = make_shape(2, block_m + 5)
    tokens = [exact_tokens(shape, n, seed=n) for n in (block_m + 5, 7)]
    check_exact(shape, tokens, overrides={"block_m": block_m})


@parametrize("hidden", [128, 1024, 2560, 4096, 7168, 8192], everyday=[128, 1024, 2560])
def test_hidden_sizes(hidden: int):
    shape = make_shape(2, 5, hidden=hidden)
    check_exact(shape, [exact_tokens(shape, n, seed=n) for n in (5, 2)])


@pytest.mark.parametrize("expert", [0, 3])
def test_all_tokens_to_one_expert(expert: int):
    shape = make_shape(2, 40, num_topk=1)
    tokens = [exact_tokens(shape, n, seed=n) for n in (40, 31)]
    for own in tokens:
        own.topk_idx.fill_(expert)
    check_exact(shape, tokens)


@parametrize("num_unused_slots", [1, 2, 3], everyday=[2])
def test_unused_slots(num_unused_slots: int):
    """Up to tokens that go nowhere: their rows of y are zero."""
    shape = make_shape(2, 20, num_topk=3)
    tokens = [exact_tokens(shape, n, seed=n, num_unused_slots=num_unused_slots) for n in (20, 3)]
    check_exact(shape, tokens)


@pytest.mark.slow
def test_calls_on_one_buffer_with_changing_routing():
    shape = make_shape(3, 40, num_experts=6, num_topk=3)
    case = LayerCase(shape, exact_layer(shape))
    stats = [torch.zeros(shape.num_experts_per_rank, dtype=torch.int32) for _ in range(3)]
    total = torch.zeros(shape.num_experts, dtype=torch.int32)
    for call_idx, counts in enumerate([(40, 1, 7), (0, 0, 40), (0, 0, 0), (3, 40, 40), (8, 8, 8)]):
        tokens = [
            exact_tokens(shape, n, seed=10 * call_idx + rank, num_unused_slots=rank)
            for rank, n in enumerate(counts)
        ]
        results = case.compare_call(tokens, stats=stats)
        assert all(result.is_exact for result in results), (call_idx, results)
        total += received(shape, tokens)
        assert torch.equal(torch.cat(stats), total), call_idx


@pytest.mark.slow
def test_twenty_schedules_give_the_same_bits():
    """A random layer, whose sums do depend on their order."""
    shape = make_shape(2, 33, num_experts=4, num_topk=3)
    case = LayerCase(shape, random_layer(shape))
    tokens = [random_tokens(shape, n, seed=n) for n in (33, 18)]
    first = case.call(tokens, schedule_seed=0)
    for schedule_seed in range(1, 20):
        again = case.call(tokens, schedule_seed=schedule_seed)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), schedule_seed
