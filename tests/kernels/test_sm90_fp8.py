"""What only the SM90 kernel with FP8 weights has, in the emulator: exact layers bit for bit, random
ones within what rounding explains. The rest stands in test_other_weights.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.bounds import sums_with_errors
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import (
    Layer,
    exact_layer,
    exact_tokens,
    random_layer,
    random_tokens,
)
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize

from .layer_case import LayerCase, small_shape

BLOCK = (128, 128)
shape_of = partial(small_shape, "fp8")


def exact_case(shape: MoEShape, sum_bits: int = 24) -> LayerCase:
    layer = exact_layer(shape, sum_bits=sum_bits, scale_block=BLOCK)
    return LayerCase(shape, layer, arch="sm_90a")


def random_case(shape: MoEShape) -> LayerCase:
    """Its scales are no powers of two."""
    return LayerCase(shape, random_layer(shape, scale_block=BLOCK), arch="sm_90a")


@parametrize("block_m", [*range(8, 96, 8), 112], everyday=[8, 40, 112])
def test_every_tile(block_m: int) -> None:
    shape = shape_of(num_experts=2, hidden=256, num_max_tokens_per_rank=block_m + 5)
    tokens = exact_tokens(shape, block_m + 5, seed=block_m)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


def test_exact_with_hoppers_sums() -> None:
    shape = shape_of()
    tokens = exact_tokens(shape, 40, seed=6)
    (result,) = exact_case(shape, sum_bits=13).compare_call([tokens], hopper_fp8_sums=True)
    assert result.is_exact, result


@pytest.mark.parametrize("activation_clamp", [None, 0.3])
def test_random_layer_is_right_with_hoppers_sums(activation_clamp: float | None) -> None:
    shape = shape_of(hidden=512)
    tokens = random_tokens(shape, 50, seed=1)
    (result,) = random_case(shape).compare_call(
        [tokens], activation_clamp=activation_clamp, hopper_fp8_sums=True
    )
    assert result.is_right, result


def test_blocks_of_tokens_with_scales_of_their_own() -> None:
    """Linear1's outputs so far apart that Linear2's sums change scales on the way."""
    shape = shape_of(intermediate_hidden=512)
    made = random_layer(shape, scale_block=BLOCK)
    factors = torch.exp2(torch.tensor([0.0, 9.0, -12.0, 3.0, -2.0, 5.0, 0.0, -8.0]))
    l1 = LayerWeights(made.l1.weight, made.l1.sf * factors[None, :, None])
    case = LayerCase(shape, Layer(l1, made.l2), arch="sm_90a")
    (result,) = case.compare_call([random_tokens(shape, 30, seed=2)])
    assert result.is_right, result


@pytest.mark.parametrize("hopper_fp8_sums", [False, True])
def test_the_judge_sees_a_scale_of_another_block(hopper_fp8_sums: bool) -> None:
    shape = shape_of()
    case = random_case(shape)
    tokens = random_tokens(shape, 20, seed=4)
    (y,) = case.call([tokens], hopper_fp8_sums=hopper_fp8_sums)
    case.layer.l1.sf[:, 1, 2] *= 1.5
    sum_bits = case.numerics.sum_bits if hopper_fp8_sums else 24
    (bounds,) = case.bounds([tokens], sum_bits=sum_bits)
    assert not compare(y, bounds).is_right


def test_promoted_sums_are_bounded_more_closely() -> None:
    """Than if the tensor core had the sum over the whole K."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 2048, generator=generator, dtype=torch.float64).abs()
    weights = torch.randn(8, 2048, generator=generator, dtype=torch.float64).abs()
    sums, errors = sums_with_errors(values, weights, 13)
    same, closer = sums_with_errors(values, weights, 13, 128)
    torch.testing.assert_close(sums, same)
    assert (closer < errors / 4).all()


def test_tiles_and_shared_memory() -> None:
    config = choose_config(shape_of(), 50, arch="sm_90a")
    assert config.smem_layout["weight_blocks"].shape == (config.num_stages, 32768)
    assert config.num_mmas_per_group == 4
    assert config.candidates["block_m"]
    assert max(config.candidates["block_m"]) <= 128
    with pytest.raises(ValueError, match=r"block_m must be one of 8, 16, .*, 112, 128; got 120"):
        choose_config(shape_of(), 50, arch="sm_90a", overrides={"block_m": 120})
    with pytest.raises(ValueError, match="block_m_step must be 64 with block_m 64; got 8"):
        choose_config(shape_of(), 50, arch="sm_90a", overrides={"block_m": 64, "block_m_step": 8})
    for uneven in (False, True):
        for num_tokens in (1, 8, 30, 50):
            chosen = choose_config(shape_of(), num_tokens, arch="sm_90a", is_uneven=uneven)
            assert chosen.block_m == chosen.block_m_step <= 128
