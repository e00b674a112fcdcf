"""SM90 with FP8 weights and tokens that have a float32 scale for every 128 values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deep_moe
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import (
    exact_layer,
    exact_tokens,
    put_nan,
    random_layer,
    random_tokens,
)

from .layer_case import LayerCase

BLOCK = (128, 128)
FLOATS = "fp8_128"
SHAPE = MoEShape(1, 4, 2, 384, 256, 140, weights="fp8", token_format=FLOATS)


def exact_case(shape: MoEShape, sum_bits: int = 24) -> LayerCase:
    layer = exact_layer(shape, sum_bits=sum_bits, scale_block=BLOCK)
    return LayerCase(shape, layer, arch="sm_90a")


def random_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, random_layer(shape, scale_block=BLOCK), arch="sm_90a")


@pytest.mark.parametrize("block_m", [8, 40, 88, 112, 128])
def test_tiles_with_one_and_two_sets_of_products(block_m: int) -> None:
    tokens = exact_tokens(SHAPE, block_m + 5, seed=block_m)
    (result,) = exact_case(SHAPE).compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


def test_all_that_a_layer_may_have_beside_them() -> None:
    """Biases, shared experts, a ring, an intermediate size that is padded, NaN in a token."""
    shape = replace(
        SHAPE, intermediate_hidden=160, biases=True, num_shared_experts=1, num_pool_tokens=384
    )
    tokens = put_nan(exact_tokens(shape, 140, seed=2), 1, seed=2)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": 40})
    assert result.is_right, result
    assert result.num_equal == result.num_values - shape.hidden  # NaN equals nothing


def test_exact_with_hoppers_sums() -> None:
    tokens = exact_tokens(SHAPE, 40, seed=6)
    (result,) = exact_case(SHAPE, sum_bits=13).compare_call([tokens], hopper_fp8_sums=True)
    assert result.is_exact, result


@pytest.mark.parametrize("hopper_fp8_sums", [False, True])
def test_scales_that_are_no_powers_of_two(hopper_fp8_sums: bool) -> None:
    case = random_case(SHAPE)
    tokens = random_tokens(SHAPE, 40, seed=1)
    assert bool((tokens.x_sf.view(torch.int32) & 0x7FFFFF).all())
    (result,) = case.compare_call([tokens], hopper_fp8_sums=hopper_fp8_sums)
    assert result.is_right, result


def test_rounding_them_to_powers_of_two_would_be_noticed() -> None:
    case = random_case(SHAPE)
    tokens = random_tokens(SHAPE, 40, seed=1)
    rounded = replace(tokens, x_sf=tokens.x_sf.log2().round().exp2())
    (y,) = case.call([rounded])
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


def test_prepared_inputs() -> None:
    """Of two ranks, one call after the other."""
    shape = replace(SHAPE, num_ranks=2, num_max_tokens_per_rank=40)
    case = random_case(shape)
    for counts in ((17, 5), (0, 30)):
        tokens = []
        for buffer, count in zip(case.ranks.buffers, counts, strict=True):
            own = random_tokens(shape, count, seed=count)
            x = torch.randn(count, shape.hidden, generator=torch.Generator().manual_seed(count))
            if count > 2:
                x[1], x[2, :128] = 0.0, 1e-6
                x[2, 200] = torch.inf
            deep_moe.prepare_inputs(
                x.bfloat16(), own.topk_idx, own.topk_weights, buffer, arch="sm_90a"
            )
            values, scales = quantize_e4m3_float(x.bfloat16())
            assert torch.equal(buffer.x[:count].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(buffer.x_sf[:count], scales)
            tokens.append(replace(own, x=values, x_sf=scales))
        results = case.compare_call(tokens)
        assert all(result.is_right for result in results), results


@pytest.mark.parametrize(
    ("arch", "weights", "allowed"),
    [
        ("sm_100a", "fp8", "mxfp8 or fp8_token"),
        ("sm_103a", "fp8", "mxfp8 or fp8_token"),
        ("sm_90a", "mxfp4", "mxfp8 or bf16"),
        ("sm_90a", "bf16", "bf16"),
    ],
)
def test_who_does_not_take_them(arch: str, weights: str, allowed: str) -> None:
    words = f"token_format must be {allowed} with {weights} weights on {arch}; got '{FLOATS}'"
    with pytest.raises(ValueError, match=words):
        choose_config(replace(SHAPE, weights=weights), 1, arch=arch)


def test_a_call_for_another_target_is_refused() -> None:
    case = exact_case(SHAPE)
    case.arch = "sm_100a"
    words = (
        r"weights\[0\] must be fp8 weights beside fp8_128 tokens for sm100, .* laid out for sm90"
    )
    with pytest.raises(ValueError, match=words):
        case.call([exact_tokens(SHAPE, 3)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_format": "float32"}, "token_format must be one of mxfp8, fp8_128_ue8m0"),
        (
            {"token_format": "fp8_128_pow2"},
            "token_format must be one that products take, as 'mxfp8'",
        ),
        ({"hidden": 352}, "hidden must be a multiple of 128 with token_format fp8_128"),
    ],
)
def test_what_is_refused_for_any_target(change: dict[str, str | int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SHAPE, **change)


def test_the_buffer() -> None:
    sizes = (4, 16, 2, 384, 256)
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, *sizes, weights="fp8", token_format=FLOATS, device="cpu"
    )
    assert (buffer.x_sf.dtype, buffer.x_sf.shape) == (torch.float32, (16, 3))
    assert buffer.nbytes == deep_moe.buffer_size(1, *sizes, weights="fp8", token_format=FLOATS)
    assert "fp8 weights, fp8_128 tokens" in repr(buffer)
