"""The SM100 kernel in the emulator on layers whose result is exact: equal bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens
from tests.everyday import parametrize

from .layer_case import LayerCase

TILES = (16, 32, 64, 96, 128, 192)


def one_rank(num_tokens: int, **sizes: int) -> MoEShape:
    defaults = {"num_experts": 4, "num_topk": 2, "hidden": 256, "intermediate_hidden": 256}
    return MoEShape(num_ranks=1, num_max_tokens_per_rank=num_tokens, **{**defaults, **sizes})


def to_one_expert(tokens: Tokens, expert: int) -> Tokens:
    """The same tokens, all sent to one expert by their first slot."""
    topk_idx = torch.full_like(tokens.topk_idx, -1)
    topk_idx[:, 0] = expert
    return Tokens(tokens.x, tokens.x_sf, topk_idx, tokens.topk_weights)


@parametrize("block_m", TILES, everyday=[16, 192])
def test_every_tile(block_m: int) -> None:
    # One expert gets a full tile and a bit of a second one; the others' tiles stay partly empty.
    shape = one_rank(block_m + 11)
    tokens = exact_tokens(shape, block_m + 11, seed=block_m)
    tokens.topk_idx[: block_m + 3, 0] = 1
    tokens.topk_idx[:, 1] = torch.where(tokens.topk_idx[:, 1] == 1, 2, tokens.topk_idx[:, 1])
    case = LayerCase(shape, exact_layer(shape))
    (result,) = case.compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 33, 48, 64, 81, 95])
def test_number_of_valid_rows(num_tokens: int) -> None:
    """The MMA's N, and with it where the second CTA's tokens begin, follows the valid rows."""
    shape = one_rank(96, num_experts=2)
    tokens = to_one_expert(exact_tokens(shape, num_tokens, seed=num_tokens), 1)
    case = LayerCase(shape, exact_layer(shape))
    (result,) = case.compare_call([tokens], overrides={"block_m": 96})
    assert result.is_exact, result


@pytest.mark.parametrize(
    ("hidden", "intermediate_hidden"), [(128, 128), (384, 128), (128, 384), (640, 256)]
)
def test_odd_numbers_of_blocks(hidden: int, intermediate_hidden: int) -> None:
    """With an odd hidden/128 the last pair of Linear2 blocks has only one member."""
    shape = one_rank(24, hidden=hidden, intermediate_hidden=intermediate_hidden)
    tokens = exact_tokens(shape, 24, seed=hidden)
    (result,) = LayerCase(shape, exact_layer(shape)).compare_call([tokens])
    assert result.is_exact, result


@pytest.mark.parametrize("num_sms", [2, 6])
def test_number_of_ctas(num_sms: int) -> None:
    shape = one_rank(40)
    tokens = exact_tokens(shape, 40)
    (result,) = LayerCase(shape, exact_layer(shape)).compare_call([tokens], num_sms=num_sms)
    assert result.is_exact, result


@pytest.mark.parametrize("intermediate", [4224, 8320])
def test_more_than_64_linear1_blocks(intermediate: int) -> None:
    """Arrival bits of two and three words, and what the first call leaves in them. The buffer has
    as many on both architectures, though SM90's blocks have twice the rows: there 4224 needs the
    first word only, and 130 blocks are more than 64 with 8320."""
    shape = one_rank(8, num_experts=1, num_topk=1, hidden=128, intermediate_hidden=intermediate)
    case = LayerCase(shape, exact_layer(shape))
    for seed in range(2):
        (result,) = case.compare_call([exact_tokens(shape, 5, seed=seed)])
        assert result.is_exact, result
        case.check_control_words()


@pytest.mark.parametrize(("turn", "lead", "unit"), [(1, 1, 1), (1, 2, 2), (4, 40, 3)])
def test_turns(turn: int, lead: int, unit: int) -> None:
    shape = one_rank(40)
    tokens = exact_tokens(shape, 40, seed=1)
    (result,) = LayerCase(shape, exact_layer(shape)).compare_call(
        [tokens],
        overrides={
            "num_turn_m_blocks": turn,
            "num_lead_m_blocks": lead,
            "num_unit_m_blocks": unit,
        },
    )
    assert result.is_exact, result


@pytest.mark.parametrize("block_m", [16, 192])
def test_two_ranks_with_different_numbers_of_tokens(block_m: int) -> None:
    shape = MoEShape(
        num_ranks=2,
        num_experts=6,
        num_topk=3,
        hidden=256,
        intermediate_hidden=128,
        num_max_tokens_per_rank=48,
    )
    tokens = [
        exact_tokens(shape, 48, seed=1, num_unused_slots=1),
        exact_tokens(shape, 13, seed=2),
    ]
    case = LayerCase(shape, exact_layer(shape))
    results = case.compare_call(tokens, overrides={"block_m": block_m})
    assert all(result.is_exact for result in results), results


def test_calls_after_each_other() -> None:
    """Pools, combine buffer and barriers keep what earlier calls left in them."""
    shape = MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=2,
        hidden=128,
        intermediate_hidden=128,
        num_max_tokens_per_rank=40,
    )
    case = LayerCase(shape, exact_layer(shape))
    counts = [(40, 3), (0, 17), (1, 40), (0, 0), (5, 5)]
    for call_idx, (first, second) in enumerate(counts):
        tokens = [
            exact_tokens(shape, first, seed=2 * call_idx, num_unused_slots=call_idx % 2),
            exact_tokens(shape, second, seed=2 * call_idx + 1),
        ]
        results = case.compare_call(tokens)
        assert all(result.is_exact for result in results), (call_idx, results)


@pytest.mark.parametrize("schedule_seed", range(1, 5))
def test_schedules(schedule_seed: int) -> None:
    """Other interleavings of the warps give the same bits."""
    shape = one_rank(33)
    tokens = exact_tokens(shape, 33, seed=3)
    (result,) = LayerCase(shape, exact_layer(shape)).compare_call(
        [tokens], overrides={"block_m": 32}, schedule_seed=schedule_seed
    )
    assert result.is_exact, result


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_shapes_tiles_and_schedules_at_random(seed: int) -> None:
    generator = random.Random(seed)
    num_ranks = generator.choice([1, 1, 2, 3, 4])
    num_experts_per_rank = generator.choice([1, 2, 3, 5])
    num_topk = generator.randint(1, min(num_ranks * num_experts_per_rank, 6))
    max_tokens = generator.choice([1, 7, 20, 50, 130, 250])
    shape = MoEShape(
        num_ranks=num_ranks,
        num_experts=num_ranks * num_experts_per_rank,
        num_topk=num_topk,
        hidden=128 * generator.randint(1, 6),
        intermediate_hidden=128 * generator.randint(1, 5),
        num_max_tokens_per_rank=max_tokens,
    )
    tokens = [
        exact_tokens(
            shape,
            generator.choice([0, 1, max_tokens, generator.randint(0, max_tokens)]),
            seed=generator.randrange(1000),
            num_unused_slots=generator.randint(0, num_topk),
        )
        for _ in range(num_ranks)
    ]
    overrides = {"block_m": generator.choice(TILES), "num_stages": generator.randint(2, 4)}
    results = LayerCase(shape, exact_layer(shape, seed=seed)).compare_call(
        tokens,
        overrides=overrides,
        num_sms=generator.choice([2, 4, 6, 8]),
        schedule_seed=seed,
    )
    assert all(result.is_exact for result in results), (shape, overrides, results)
