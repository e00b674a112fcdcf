"""The SM90 kernel with BF16 weights in the emulator: exact layers bit for bit, random ones within
what rounding explains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.heuristics import MoEShape, choose_config
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens

from .layer_case import FITTED, LayerCase


def shape_of(num_ranks: int = 1, **sizes: int) -> MoEShape:
    defaults = {
        "num_experts": 4,
        "num_topk": 2,
        "hidden": 384,
        "intermediate_hidden": 256,
        "num_max_tokens_per_rank": 50,
    }
    return MoEShape(num_ranks=num_ranks, weights="bf16", **{**defaults, **sizes})


def exact_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, exact_layer(shape), arch="sm_90a")


def random_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, random_layer(shape), arch="sm_90a")


@pytest.mark.parametrize("block_m", range(8, 184, 24))
def test_tiles(block_m: int) -> None:
    shape = shape_of(num_experts=2, hidden=256, num_max_tokens_per_rank=block_m + 5)
    tokens = exact_tokens(shape, block_m + 5, seed=block_m)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@pytest.mark.parametrize("overrides", [FITTED, {"block_m": 64, "block_m_step": 8}])
def test_tiles_fitted_to_each_expert(overrides: dict[str, int]) -> None:
    shape = shape_of(num_max_tokens_per_rank=180)
    tokens = exact_tokens(shape, 180, seed=1)
    tokens.topk_idx[:90, 0], tokens.topk_idx[:90, 1] = 0, 1
    (result,) = exact_case(shape).compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


@pytest.mark.parametrize(("hidden", "intermediate_hidden"), [(128, 128), (384, 128), (128, 640)])
def test_odd_numbers_of_blocks(hidden: int, intermediate_hidden: int) -> None:
    shape = shape_of(hidden=hidden, intermediate_hidden=intermediate_hidden)
    tokens = exact_tokens(shape, 24, seed=hidden)
    (result,) = exact_case(shape).compare_call([tokens])
    assert result.is_exact, result


def test_ranks_and_calls_in_a_row() -> None:
    shape = shape_of(num_ranks=2)
    calls = [
        [exact_tokens(shape, count, seed=10 * i + count) for count in counts]
        for i, counts in enumerate([(17, 5), (0, 30)])
    ]
    for of_call in exact_case(shape).compare_calls_in_a_row(calls):
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
    (result,) = random_case(shape).compare_call([tokens], activation_clamp=activation_clamp)
    assert result.is_right, result
    # A value is off by a BF16 unit here and there, and hardly ever by more.
    assert result.num_near > 0.999 * result.num_values


def test_nan_stays_in_its_token() -> None:
    shape = shape_of()
    case = random_case(shape)
    tokens = random_tokens(shape, 30, seed=5)
    (clean,) = case.call([tokens])
    tokens.x[7, 100] = torch.nan
    (y,) = case.call([tokens])
    assert y[7].isnan().all()
    others = torch.arange(30) != 7
    assert torch.equal(y[others], clean[others])


def test_the_judge_sees_one_other_weight() -> None:
    shape = shape_of()
    case = random_case(shape)
    tokens = random_tokens(shape, 20, seed=4)
    (y,) = case.call([tokens])
    case.layer.l2.weight[:, 5, 17] *= 1.5
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


def test_tiles_and_shared_memory() -> None:
    config = choose_config(shape_of(), 50, arch="sm_90a")
    assert config.block_k == 64
    assert config.num_l1_k_blocks == 6
    assert config.smem_layout["weight_blocks"].shape == (config.num_stages, 32768)
    assert config.smem_layout["activations"].shape[2] == 128
    assert config.smem_layout["pull_buffers"].shape == (2, 768)
    assert "amax_exchange" not in {segment.name for segment in config.smem_layout.segments}
    names = {segment.name for segment in config.symm_buffer_layout.segments}
    assert not names & {"input_x_sf", "l1_token_sf", "l2_token_sf"}
