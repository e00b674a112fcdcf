"""The SM90 kernel with MXFP4 weights and BF16 tokens in the emulator: exact layers bit for bit,
random ones within what rounding explains."""

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
    return MoEShape(num_ranks=num_ranks, weights="mxfp4_bf16", **{**defaults, **sizes})


def exact_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, exact_layer(shape), arch="sm_90a")


def random_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, random_layer(shape), arch="sm_90a")


# Products in pairs and one by one.
@pytest.mark.parametrize("block_m", [8, 56, 152, 168])
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


@pytest.mark.parametrize(("hidden", "intermediate_hidden"), [(128, 128), (352, 160), (128, 640)])
def test_odd_and_padded_sizes(hidden: int, intermediate_hidden: int) -> None:
    shape = shape_of(hidden=hidden, intermediate_hidden=intermediate_hidden)
    tokens = exact_tokens(shape, 24, seed=hidden)
    (result,) = exact_case(shape).compare_call([tokens])
    assert result.is_exact, result


def test_ranks_shared_experts_and_calls_in_a_row() -> None:
    shape = replace(shape_of(num_ranks=2), num_shared_experts=1)
    calls = [
        [exact_tokens(shape, count, seed=10 * i + count) for count in counts]
        for i, counts in enumerate([(17, 5), (0, 30)])
    ]
    for of_call in exact_case(shape).compare_calls_in_a_row(calls):
        assert all(result.is_exact for result in of_call), of_call


def test_a_small_ring_and_clusters() -> None:
    shape = replace(shape_of(num_max_tokens_per_rank=300), num_pool_tokens=384)
    tokens = exact_tokens(shape, 300, seed=3)
    overrides = {"block_m": 32, "cluster_size": 2}
    (result,) = exact_case(shape).compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


@pytest.mark.parametrize("activation_clamp", [None, 0.3])
def test_random_layer_is_right(activation_clamp: float | None) -> None:
    shape = shape_of(hidden=512)
    tokens = random_tokens(shape, 50, seed=1)
    (result,) = random_case(shape).compare_call([tokens], activation_clamp=activation_clamp)
    assert result.is_right, result
    # A value is off by a BF16 unit here and there, and hardly ever by more.
    assert result.num_near > 0.999 * result.num_values


def test_groups_that_are_far_apart_keep_their_values() -> None:
    """One group of each row is 2^90 times as large as the others, and what it is multiplied by is
    zero: what counts is decoded 2^90 below what the row is scaled to."""
    shape = shape_of()
    layer = random_layer(shape)
    for own in (layer.l1, layer.l2):
        own.sf.view(torch.uint8)[..., 0] += 90
    layer.l2.weight[..., :16] = 0
    tokens = random_tokens(shape, 30, seed=2)
    tokens.x[:, :32] = 0
    (result,) = LayerCase(shape, layer, arch="sm_90a").compare_call([tokens])
    assert result.is_right, result
    assert result.num_near > 0.999 * result.num_values


def test_the_judge_sees_one_other_weight() -> None:
    shape = shape_of()
    case = random_case(shape)
    tokens = random_tokens(shape, 20, seed=4)
    (y,) = case.call([tokens])
    case.layer.l2.weight[:, 5, 17] ^= 0x33
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


def test_stages_are_small() -> None:
    config = choose_config(shape_of(), 50, arch="sm_90a")
    assert config.block_k == 64
    assert config.num_l1_k_blocks == 6
    assert config.smem_layout["weight_blocks"].shape == (config.num_stages, 8704)
    names = {segment.name for segment in config.smem_layout.segments}
    assert "row_factors" in names
    assert not names & {"amax_exchange", "l1_token_factors", "rescale_factors"}
    names = {segment.name for segment in config.symm_buffer_layout.segments}
    assert not names & {"input_x_sf", "l1_token_sf", "l2_token_sf"}
