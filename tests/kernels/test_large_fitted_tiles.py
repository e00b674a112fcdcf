"""m-blocks of four sizes in one kernel, which FP8 and BF16 weights have on SM90 where experts have
several."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_moe.formats.sizes import SCALE_GROUP
from deep_moe.heuristics.sm90_tiles import LARGE_FITTED_TILE
from deep_moe.trial.synthetic import exact_layer, exact_tokens

from .layer_case import LayerCase, small_shape

# Tokens of an expert, and its m-blocks: 2 x 128, 80, 112 and 96, 2 x 80.
COUNTS = (250, 80, 200, 130)
SCALE_BLOCKS = {"fp8": (128, 128), "bf16": SCALE_GROUP}


@pytest.mark.slow
@pytest.mark.parametrize("num_pool_tokens", [None, 384])
@pytest.mark.parametrize("cluster_size", [1, 2])
@pytest.mark.parametrize("weights", SCALE_BLOCKS)
def test_all_sizes(weights: str, cluster_size: int, num_pool_tokens: int | None) -> None:
    num_tokens = sum(COUNTS) // 2
    shape = small_shape(weights, num_experts=4, hidden=256, num_max_tokens_per_rank=num_tokens)
    shape = replace(shape, num_pool_tokens=num_pool_tokens)
    layer = exact_layer(shape, scale_block=SCALE_BLOCKS[weights])
    tokens = exact_tokens(shape, num_tokens, seed=1)
    for slot, first in enumerate((0, 2)):
        tokens.topk_idx[: COUNTS[first], slot] = first
        tokens.topk_idx[COUNTS[first] :, slot] = first + 1
    block_m, step = LARGE_FITTED_TILE
    overrides = {"block_m": block_m, "block_m_step": step, "cluster_size": cluster_size}
    case = LayerCase(shape, layer, arch="sm_90a")
    for result in case.compare_call([tokens], overrides=overrides):
        assert result.is_exact, result
