"""What only the SM90 kernel with MXFP4 weights and BF16 tokens has, in the emulator. The rest
stands in test_other_weights.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from deep_moe.activations import Activation, Situ, SwigluOai
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens

from .layer_case import FITTED, LayerCase, small_shape

shape_of = partial(small_shape, "mxfp4 x bf16")


def exact_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, exact_layer(shape), arch="sm_90a")


def random_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, random_layer(shape), arch="sm_90a")


# Products in pairs and one by one.
@pytest.mark.parametrize("block_m", [8, 56, 152, 176])
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


def test_a_small_ring_and_clusters() -> None:
    shape = replace(shape_of(num_max_tokens_per_rank=300), num_pool_tokens=384)
    tokens = exact_tokens(shape, 300, seed=3)
    overrides = {"block_m": 32, "cluster_size": 2}
    (result,) = exact_case(shape).compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


def test_shared_experts_with_biases_of_ranks() -> None:
    shape = replace(shape_of(num_ranks=2), num_shared_experts=1, biases=True)
    tokens = [exact_tokens(shape, count, seed=count) for count in (17, 5)]
    for result in exact_case(shape).compare_call(tokens):
        assert result.is_exact, result


@pytest.mark.parametrize("activation", [SwigluOai(), Situ()])
def test_other_activations(activation: Activation) -> None:
    shape = shape_of()
    case = random_case(shape)
    tokens = random_tokens(shape, 30, seed=6)
    (y,) = case.call([tokens], activation=activation)
    bounds = reference_bounds(
        tokens.x,
        tokens.x_sf,
        tokens.topk_idx,
        tokens.topk_weights,
        case.layer.l1,
        case.layer.l2,
        activation=activation,
        numerics=case.numerics,
        sum_bits=FP32_SUM_BITS,
    )
    assert compare(y, bounds).is_right


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
