"""Biases of both layers in the emulator, on every target and with every format of weights: exact
layers bit for bit, random ones within what rounding explains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.targets import TARGETS
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import (
    Tokens,
    exact_layer,
    exact_tokens,
    name_twice,
    random_layer,
    random_tokens,
)
from tests.everyday import parametrize
from tests.pairs import formats, usual_pairs

from .layer_case import FEW, FITTED, LayerCase

# sm_103a's kernels are those of sm_100a.
COMBINATIONS = [(name, pair) for name in ("sm_90a", "sm_100a") for pair in usual_pairs(name)]


def shape_of(weights: str = "mxfp4", num_ranks: int = 1, **sizes: Any) -> MoEShape:
    defaults = {
        "num_experts": 4,
        "num_topk": 2,
        "hidden": 384,
        "intermediate_hidden": 256,
        "num_max_tokens_per_rank": 50,
    }
    return MoEShape(num_ranks=num_ranks, **formats(weights), biases=True, **{**defaults, **sizes})


def case_of(shape: MoEShape, arch: str, *, exact: bool = True, **how: Any) -> LayerCase:
    scale_block = TARGETS[arch].weights_of(shape.weights, shape.token_format).scale_block
    make = exact_layer if exact else random_layer
    return LayerCase(shape, make(shape, scale_block=scale_block, **how), arch=arch)


@parametrize(
    ("arch", "weights"),
    COMBINATIONS,
    everyday=[("sm_90a", "fp8"), ("sm_90a", "mxfp4 x bf16"), ("sm_100a", "bf16")],
)
def test_exact_layer(arch: str, weights: str) -> None:
    shape = shape_of(weights)
    tokens = exact_tokens(shape, 40, seed=3)
    (result,) = case_of(shape, arch).compare_call([tokens])
    assert result.is_exact, result


@parametrize(
    ("arch", "weights"), COMBINATIONS, everyday=[("sm_90a", "mxfp4"), ("sm_100a", "mxfp4")]
)
def test_random_layer_is_right(arch: str, weights: str) -> None:
    shape = shape_of(weights, hidden=512)
    tokens = random_tokens(shape, 50, seed=1)
    (result,) = case_of(shape, arch, exact=False).compare_call([tokens], activation_clamp=1.5)
    assert result.is_right, result


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ranks_and_calls_in_a_row(arch: str) -> None:
    shape = shape_of(num_ranks=2)
    calls = [
        [name_twice(exact_tokens(shape, count, seed=10 * i + count)) for count in counts]
        for i, counts in enumerate([(17, 5), (0, 30)])
    ]
    for of_call in case_of(shape, arch).compare_calls_in_a_row(calls):
        assert all(result.is_exact for result in of_call), of_call


@parametrize(
    "overrides",
    [{"block_m": 8}, {"block_m": 24}, {"block_m": 168}, FITTED],
    everyday=[{"block_m": 8}, FITTED],
    ids=str,
)
def test_kinds_of_tiles_on_sm90(overrides: dict[str, int]) -> None:
    shape = shape_of(num_experts=2)
    tokens = exact_tokens(shape, 50, seed=7)
    (result,) = case_of(shape, "sm_90a").compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


@pytest.mark.parametrize("block_m", [16, 64, 192])
def test_tiles_on_sm100(block_m: int) -> None:
    shape = shape_of(num_experts=2)
    tokens = exact_tokens(shape, 50, seed=7)
    (result,) = case_of(shape, "sm_100a").compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@pytest.mark.slow
@pytest.mark.parametrize("block_m", [8, 64])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_ring_keeps_the_weights_until_linear2_has_them(arch: str, block_m: int) -> None:
    """Tokens come to the rows of others, whose routing weights differ."""
    shape = shape_of(num_max_tokens_per_rank=400, num_pool_tokens=384)
    tokens = exact_tokens(shape, 400, seed=2)
    overrides = {"block_m": max(block_m, 16) if arch == "sm_100a" else block_m}
    (result,) = case_of(shape, arch).compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


def test_exact_with_hoppers_sums() -> None:
    for weights in ("mxfp4", "fp8"):
        shape = shape_of(weights)
        tokens = exact_tokens(shape, 40, seed=6)
        case = case_of(shape, "sm_90a", sum_bits=13)
        (result,) = case.compare_call([tokens], hopper_fp8_sums=True)
        assert result.is_exact, (weights, result)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_judge_sees_a_bias_of_another_row_and_one_left_out(arch: str) -> None:
    shape = shape_of()
    case = case_of(shape, arch, exact=False)
    tokens = random_tokens(shape, FEW, seed=4)
    (y,) = case.call([tokens])
    (bounds,) = case.bounds([tokens])
    assert compare(y, bounds).is_right
    for bias in (case.layer.l1_bias, case.layer.l2_bias):
        assert bias is not None
        kept = bias.clone()
        for changed in (kept.roll(1, dims=0), kept.roll(1, dims=1), torch.zeros_like(kept)):
            bias.copy_(changed)
            (bounds,) = case.bounds([tokens])
            assert not compare(y, bounds).is_right
        bias.copy_(kept)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_weight_that_is_nan_or_zero_stays_in_its_slot(arch: str) -> None:
    """Zero times a bias is zero; NaN is in all of the token."""
    shape = shape_of()
    case = case_of(shape, arch, exact=False)
    tokens = random_tokens(shape, FEW, seed=5)
    weights = tokens.topk_weights.clone()
    weights[3], weights[7, 0] = 0.0, torch.nan
    (clean,) = case.call([tokens])
    (y,) = case.call([Tokens(tokens.x, tokens.x_sf, tokens.topk_idx, weights)])
    assert (y[3] == 0).all()
    assert y[7].isnan().all()
    others = torch.tensor([i not in (3, 7) for i in range(FEW)])
    assert torch.equal(y[others], clean[others])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["mxfp4", "bf16"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_shared_experts_have_biases_of_their_own(arch: str, weights: str) -> None:
    shape = shape_of(weights, num_ranks=2, num_shared_experts=2)
    tokens = [exact_tokens(shape, count, seed=count) for count in (20, 7)]
    for result in case_of(shape, arch).compare_call(tokens):
        assert result.is_exact, result
