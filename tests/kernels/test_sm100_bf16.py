"""The SM100 kernel with BF16 weights in the emulator, by both names: exact layers bit for bit,
random ones within what rounding explains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.heuristics import MoEShape, choose_config
from deep_moe.targets import target_of
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens

from .layer_case import LayerCase


def shape_of(num_ranks: int = 1, **sizes: int) -> MoEShape:
    defaults = {
        "num_experts": 4,
        "num_topk": 2,
        "hidden": 384,
        "intermediate_hidden": 256,
        "num_max_tokens_per_rank": 50,
    }
    return MoEShape(num_ranks=num_ranks, weights="bf16", **{**defaults, **sizes})


def exact_case(shape: MoEShape, arch: str = "sm_100a") -> LayerCase:
    return LayerCase(shape, exact_layer(shape), arch=arch)


@pytest.mark.parametrize("block_m", [16, 32, 64, 96, 128, 192])
def test_every_tile(block_m: int) -> None:
    shape = shape_of(num_experts=2, hidden=256, num_max_tokens_per_rank=block_m + 5)
    tokens = exact_tokens(shape, block_m + 5, seed=block_m)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@pytest.mark.parametrize(("hidden", "intermediate_hidden"), [(128, 128), (384, 128), (128, 640)])
def test_odd_numbers_of_blocks(hidden: int, intermediate_hidden: int) -> None:
    shape = shape_of(hidden=hidden, intermediate_hidden=intermediate_hidden)
    tokens = exact_tokens(shape, 24, seed=hidden)
    (result,) = exact_case(shape).compare_call([tokens])
    assert result.is_exact, result


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_ranks_and_calls_in_a_row(arch: str) -> None:
    shape = shape_of(num_ranks=2)
    calls = [
        [exact_tokens(shape, count, seed=10 * i + count) for count in counts]
        for i, counts in enumerate([(17, 5), (0, 30)])
    ]
    for of_call in exact_case(shape, arch).compare_calls_in_a_row(calls):
        assert all(result.is_exact for result in of_call), of_call


def test_a_ring_of_the_smallest_size() -> None:
    shape = replace(shape_of(num_max_tokens_per_rank=300), num_pool_tokens=384)
    tokens = exact_tokens(shape, 300, seed=3)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": 32})
    assert result.is_exact, result


@pytest.mark.parametrize("activation_clamp", [None, 0.3])
def test_random_layer_is_right(activation_clamp: float | None) -> None:
    shape = shape_of(hidden=512)
    tokens = random_tokens(shape, 50, seed=1)
    case = LayerCase(shape, random_layer(shape))
    (result,) = case.compare_call([tokens], activation_clamp=activation_clamp)
    assert result.is_right, result
    assert result.num_near > 0.999 * result.num_values


def test_nan_stays_in_its_token() -> None:
    shape = shape_of()
    case = LayerCase(shape, random_layer(shape))
    tokens = random_tokens(shape, 30, seed=5)
    (clean,) = case.call([tokens])
    tokens.x[7, 100] = torch.nan
    (y,) = case.call([tokens])
    assert y[7].isnan().all()
    others = torch.arange(30) != 7
    assert torch.equal(y[others], clean[others])


def test_memory_has_no_scales() -> None:
    config = choose_config(shape_of(), 50)
    smem, tmem = config.smem_layout, config.tmem_layout
    assert config.block_k == 64
    assert smem["weights"].shape == (config.num_stages, 128, 128)
    assert smem["activations"].shape == (config.num_stages, config.block_m // 2, 128)
    names = {segment.name for segment in smem.segments}
    assert not names & {"activation_sf", "weight_sf", "amax_exchange"}
    assert tmem is not None
    assert [segment.name for segment in tmem.segments] == ["accumulator"]
    assert target_of("sm_100a").weights_of("bf16").numerics.scale_block is None
