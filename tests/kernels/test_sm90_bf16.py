"""What only the SM90 kernel with BF16 weights has, in the emulator. The rest stands in
test_other_weights.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens
from tests.everyday import parametrize

from .layer_case import FITTED, LayerCase, small_shape

shape_of = partial(small_shape, "bf16")


def exact_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, exact_layer(shape), arch="sm_90a")


def random_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, random_layer(shape), arch="sm_90a")


@parametrize("block_m", range(8, 184, 24), everyday=[8, 104, 176])
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


def test_a_ring_of_the_smallest_size() -> None:
    shape = replace(shape_of(num_max_tokens_per_rank=300), num_pool_tokens=384)
    tokens = exact_tokens(shape, 300, seed=3)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": 32})
    assert result.is_exact, result


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
