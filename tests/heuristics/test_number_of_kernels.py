"""How many kernels the calls of a deployment take, and what taking fewer costs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from deep_moe.fused.deployment import deployment_configs
from deep_moe.heuristics import preset_shape
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.heuristics.sm90_tiles import (
    UNEVEN_VARIATION,
    _is_of_others,
    choose_tile,
    expected_cost,
    likely_counts,
)
from deep_moe.targets import MegaMoEConfig, choose_config, target_of
from tests.everyday import parametrize
from tests.pairs import formats, usual_pairs

MAX_TOKENS = 8192


@parametrize(
    ("arch", "weights", "most"),
    [
        ("sm_90a", "mxfp4", 23),
        ("sm_90a", "fp8", 18),
        ("sm_90a", "bf16", 29),
        ("sm_90a", "mxfp4 x bf16", 21),
        ("sm_90a", "nvfp4", 21),
        ("sm_90a", "int4", 21),
        ("sm_90a", "mxfp8", 21),
        ("sm_100a", "mxfp4", 8),
    ],
    everyday=[("sm_90a", "mxfp4", 23), ("sm_100a", "mxfp4", 8)],
)
def test_a_deployment_of_deepseek_v4_pro(arch: str, weights: str, most: int) -> None:
    shape = preset_shape("deepseek-v4-pro", num_ranks=8, num_max_tokens_per_rank=MAX_TOKENS)
    shape = replace(shape, **formats(weights), num_pool_tokens=DEFAULT_POOL_TOKENS)

    def choose(num_tokens: int, is_uneven: bool = False) -> MegaMoEConfig:
        return choose_config(shape, num_tokens, is_uneven=is_uneven, arch=arch)

    both = (choose, partial(choose, is_uneven=True)) if arch == "sm_90a" else (choose,)
    configs = {config for own in both for _, _, config in deployment_configs(own, MAX_TOKENS)}
    assert len(configs) <= most


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("weights", usual_pairs("sm_90a"))
def test_tiles_that_are_spared_cost_less_than_half_a_percent(weights: str, is_uneven: bool) -> None:
    """At any number of tokens, by the formula."""
    kind = target_of("sm_90a").weights_of(**formats(weights)).kind
    for expected in (*range(1, 127), *range(128, 1024, 32)):
        allowed = [tile for tile in kind.tiles if not _is_of_others(tile, expected, is_uneven)]
        chosen = choose_tile(Fraction(expected), kind, is_uneven)
        counts = likely_counts(float(expected), UNEVEN_VARIATION if is_uneven else 0.0)
        costs = {tile: expected_cost(tile, counts, kind) for tile in allowed}
        assert costs[chosen] <= 1.005 * min(costs.values()), expected
