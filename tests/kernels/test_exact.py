"""Each target's kernel in the emulator on layers whose result is exact: equal bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens, random_layer, random_tokens
from tests.everyday import parametrize

from .layer_case import FITTED, LayerCase

TILES = {
    "sm_90a": (8, 16, 24, 40, 48, 64, 72, 80, 96, 112, 128, 136, 144, 152, 160, 168, 176),
    "sm_100a": (16, 32, 64, 96, 128, 192),
}
on_each = pytest.mark.parametrize("arch", TILES)


def each(sm90: list[Any], sm100: list[Any]) -> list[Any]:
    """Parameters of a test, behind the target that each goes with."""
    own = {"sm_90a": sm90, "sm_100a": sm100}
    return [
        (arch, *value) if isinstance(value, tuple) else (arch, value)
        for arch, values in own.items()
        for value in values
    ]


def one_rank(num_tokens: int, **sizes: int) -> MoEShape:
    defaults = {"num_experts": 4, "num_topk": 2, "hidden": 256, "intermediate_hidden": 256}
    return MoEShape(num_ranks=1, num_max_tokens_per_rank=num_tokens, **{**defaults, **sizes})


def exact_case(shape: MoEShape, arch: str = "sm_90a") -> LayerCase:
    return LayerCase(shape, exact_layer(shape), arch=arch)


def to_one_expert(tokens: Tokens, expert: int) -> Tokens:
    """The same tokens, all sent to one expert by their first slot."""
    topk_idx = torch.full_like(tokens.topk_idx, -1)
    topk_idx[:, 0] = expert
    return Tokens(tokens.x, tokens.x_sf, topk_idx, tokens.topk_weights)


@parametrize(
    ("arch", "block_m"),
    [(arch, block_m) for arch, tiles in TILES.items() for block_m in tiles],
    everyday=each([8, 64, 152, 176], [16, 192]),
)
def test_every_tile(arch: str, block_m: int) -> None:
    # One expert gets a full tile and a bit of a second one; the others' tiles stay partly empty.
    shape = one_rank(block_m + 11)
    tokens = exact_tokens(shape, block_m + 11, seed=block_m)
    tokens.topk_idx[: block_m + 3, 0] = 1
    tokens.topk_idx[:, 1] = torch.where(tokens.topk_idx[:, 1] == 1, 2, tokens.topk_idx[:, 1])
    (result,) = exact_case(shape, arch).compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@pytest.mark.parametrize(
    ("tile", "counts"),
    [
        (FITTED, [1, 64, 65, 96, 97, 128, 129, 161, 0, 192, 193, 289]),
        ({"block_m": 64, "block_m_step": 8}, [1, 40, 41, 48, 56, 57, 64, 65, 0, 95, 128, 129]),
    ],
    ids=["64, 96, 128", "40 to 64"],
)
def test_experts_that_need_blocks_of_different_sizes(
    tile: dict[str, int], counts: list[int]
) -> None:
    """One to three m-blocks, full, with one row, or with one row missing."""
    shape = one_rank(max(counts), num_experts=12, num_topk=12, hidden=128, intermediate_hidden=128)
    tokens = exact_tokens(shape, max(counts), seed=5)
    token_idx = torch.arange(max(counts)).unsqueeze(1)
    experts = torch.arange(12).expand_as(tokens.topk_idx)
    topk_idx = torch.where(token_idx < torch.tensor(counts), experts, -1)
    (result,) = exact_case(shape).compare_call(
        [Tokens(tokens.x, tokens.x_sf, topk_idx, tokens.topk_weights)],
        overrides=tile,
    )
    assert result.is_exact, result


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
def test_few_tokens_have_a_warp_for_each_chunk_in_combine(num_tokens: int) -> None:
    """8 warps are enough for three chunks of two tokens, the last chunk shorter than the others."""
    shape = one_rank(9, hidden=256)
    (result,) = exact_case(shape).compare_call(
        [exact_tokens(shape, num_tokens)], overrides={"num_combine_chunks": 3}, num_sms=1
    )
    assert result.is_exact, result


@pytest.mark.parametrize("num_tokens", [253, 2150])
def test_wide_tile(num_tokens: int) -> None:
    """SM100's tile of 240 tokens, which only a ring has room for; 2150 tokens come round it."""
    shape = one_rank(4096, num_experts=2, num_topk=1, hidden=128, num_pool_tokens=1920)
    tokens = to_one_expert(exact_tokens(shape, num_tokens, seed=num_tokens), 1)
    tokens.topk_idx[:5] = 0
    (result,) = exact_case(shape, "sm_100a").compare_call([tokens], overrides={"block_m": 240})
    assert result.is_exact, result


@pytest.mark.parametrize(
    ("arch", "num_tokens"),
    each([1, 8, 63, 95, 96], [1, 8, 9, 16, 17, 33, 48, 64, 81, 95]),
)
def test_number_of_valid_rows(arch: str, num_tokens: int) -> None:
    """SM100's N, and with it where the second CTA's tokens begin, follows the valid rows."""
    shape = one_rank(96, num_experts=2)
    tokens = to_one_expert(exact_tokens(shape, num_tokens, seed=num_tokens), 1)
    (result,) = exact_case(shape, arch).compare_call([tokens], overrides={"block_m": 96})
    assert result.is_exact, result


@on_each
@pytest.mark.parametrize(
    ("hidden", "intermediate_hidden"), [(128, 128), (384, 128), (128, 384), (640, 256)]
)
def test_odd_numbers_of_blocks(arch: str, hidden: int, intermediate_hidden: int) -> None:
    """With an odd hidden/128 half of SM90's last Linear2 block's rows do not exist, and
    SM100's last pair of them has only one member."""
    shape = one_rank(24, hidden=hidden, intermediate_hidden=intermediate_hidden)
    tokens = exact_tokens(shape, 24, seed=hidden)
    (result,) = exact_case(shape, arch).compare_call([tokens])
    assert result.is_exact, result


@pytest.mark.parametrize(("arch", "num_sms"), each([1, 2, 5], [2, 6]))
def test_number_of_ctas(arch: str, num_sms: int) -> None:
    shape = one_rank(40)
    tokens = exact_tokens(shape, 40)
    (result,) = exact_case(shape, arch).compare_call([tokens], num_sms=num_sms)
    assert result.is_exact, result


@on_each
@pytest.mark.parametrize("intermediate", [4224, 8320])
def test_more_than_64_linear1_blocks(arch: str, intermediate: int) -> None:
    """Arrival bits of two and three words, and what the first call leaves in them. The buffer has
    as many on both architectures, though SM90's blocks have twice the rows: there 4224 needs the
    first word only, and its 65 or SM100's 130 blocks are more than 64 with 8320."""
    shape = one_rank(8, num_experts=1, num_topk=1, hidden=128, intermediate_hidden=intermediate)
    case = exact_case(shape, arch)
    for seed in range(2):
        (result,) = case.compare_call([exact_tokens(shape, 5, seed=seed)])
        assert result.is_exact, result
        case.check_control_words()


@pytest.mark.parametrize(
    ("arch", "turn", "lead", "unit"),
    each([(1, 1, 1), (1, 2, 2), (2, 2, 1), (4, 40, 3)], [(1, 1, 1), (1, 2, 2), (4, 40, 3)]),
)
def test_turns(arch: str, turn: int, lead: int, unit: int) -> None:
    shape = one_rank(40)
    tokens = exact_tokens(shape, 40, seed=1)
    (result,) = exact_case(shape, arch).compare_call(
        [tokens],
        overrides={
            "num_turn_m_blocks": turn,
            "num_lead_m_blocks": lead,
            "num_unit_m_blocks": unit,
        },
    )
    assert result.is_exact, result


@pytest.mark.parametrize("num_stages", [2, 3])
def test_few_stages(num_stages: int) -> None:
    """Blocks of a single k-block: the loader's headers run as far ahead as they can."""
    shape = one_rank(40, hidden=128, intermediate_hidden=128)
    tokens = exact_tokens(shape, 40, seed=1)
    (result,) = exact_case(shape).compare_call(
        [tokens], num_sms=1, overrides={"num_stages": num_stages}
    )
    assert result.is_exact, result


@pytest.mark.parametrize(
    ("arch", "tile"),
    each([{"block_m": 16}, {"block_m": 128}, FITTED], [{"block_m": 16}, {"block_m": 192}]),
)
def test_two_ranks_with_different_numbers_of_tokens(arch: str, tile: dict[str, int]) -> None:
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
    results = exact_case(shape, arch).compare_call(tokens, overrides=tile)
    assert all(result.is_exact for result in results), results


@on_each
def test_calls_after_each_other(arch: str) -> None:
    """Pools, combine buffer and barriers keep what earlier calls left in them."""
    shape = MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=2,
        hidden=128,
        intermediate_hidden=128,
        num_max_tokens_per_rank=40,
    )
    case = exact_case(shape, arch)
    counts = [(40, 3), (0, 17), (1, 40), (0, 0), (5, 5)]
    for call_idx, (first, second) in enumerate(counts):
        tokens = [
            exact_tokens(shape, first, seed=2 * call_idx, num_unused_slots=call_idx % 2),
            exact_tokens(shape, second, seed=2 * call_idx + 1),
        ]
        results = case.compare_call(tokens)
        assert all(result.is_exact for result in results), (call_idx, results)


@on_each
@pytest.mark.parametrize("schedule_seed", range(1, 5))
def test_schedules(arch: str, schedule_seed: int) -> None:
    """Other interleavings of the warps give the same bits."""
    shape = one_rank(33)
    tokens = exact_tokens(shape, 33, seed=3)
    (result,) = exact_case(shape, arch).compare_call(
        [tokens], overrides={"block_m": 32}, schedule_seed=schedule_seed
    )
    assert result.is_exact, result


@pytest.mark.parametrize("activation_clamp", [None, 1.0])
@parametrize(
    "tile",
    [{"block_m": 16}, {"block_m": 64}, {"block_m": 128}, FITTED],
    everyday=[{"block_m": 16}, FITTED],
)
def test_random_layers_follow_the_reference(
    tile: dict[str, int], activation_clamp: float | None
) -> None:
    """Not exact by construction: group scales differ, so tokens are folded and Linear2's sums
    rescaled. The emulator's activation function is not the reference's to the last bit."""
    shape = one_rank(64, hidden=640, intermediate_hidden=384)
    case = LayerCase(shape, random_layer(shape), arch="sm_90a")
    (result,) = case.compare_call(
        [random_tokens(shape, 64, seed=3)],
        activation_clamp=activation_clamp,
        overrides=tile,
    )
    assert result.num_near >= 0.999 * result.num_values, result
    assert result.cosine_distance < 1e-6, result


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_sm100_shapes_tiles_and_schedules_at_random(seed: int) -> None:
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
    overrides = {
        "block_m": generator.choice(TILES["sm_100a"]),
        "num_stages": generator.randint(2, 4),
    }
    results = LayerCase(shape, exact_layer(shape, seed=seed)).compare_call(
        tokens,
        overrides=overrides,
        num_sms=generator.choice([2, 4, 6, 8]),
        schedule_seed=seed,
    )
    assert all(result.is_exact for result in results), (shape, overrides, results)
