"""FP8 weights whose scales are of rows or matrices, and tokens that have one float32 scale each:
both are factors of complete sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deep_moe
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import (
    Layer,
    exact_layer,
    exact_tokens,
    put_nan,
    random_layer,
    random_tokens,
)
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize

from .layer_case import LayerCase

ONE_SCALE = "fp8_token"
SHAPE = MoEShape(1, 4, 2, 384, 256, 200, weights="fp8", token_format=ONE_SCALE)


ARCHS = ("sm_90a", "sm_100a")
on_each = pytest.mark.parametrize("arch", ARCHS)


def exact_case(shape: MoEShape, sum_bits: int = 24, arch: str = "sm_90a") -> LayerCase:
    layer = exact_layer(shape, sum_bits=sum_bits, scale_block=WHOLE_ROW)
    return LayerCase(shape, layer, arch=arch)


def random_case(
    shape: MoEShape = SHAPE, scale_block: tuple[int, int] = WHOLE_ROW, arch: str = "sm_90a"
) -> LayerCase:
    return LayerCase(shape, random_layer(shape, scale_block=scale_block), arch=arch)


@parametrize(
    "tile",
    [(8, 8), (40, 40), (112, 112), (168, 168), (176, 176), (64, 8), (128, 32), (128, 16)],
    everyday=[(8, 8), (168, 168), (128, 16)],
)
def test_every_kind_of_tile(tile: tuple[int, int]) -> None:
    block_m, step = tile
    tokens = exact_tokens(SHAPE, block_m + 5, seed=block_m)
    overrides = {"block_m": block_m, "block_m_step": step}
    (result,) = exact_case(SHAPE).compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


@parametrize("block_m", [16, 32, 64, 96, 128, 192], everyday=[16, 192])
def test_every_tile_of_sm100(block_m: int) -> None:
    tokens = exact_tokens(SHAPE, min(block_m + 5, 200), seed=block_m)
    overrides = {"block_m": block_m, "num_stages": 3}
    (result,) = exact_case(SHAPE, arch="sm_100a").compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


@on_each
def test_all_that_a_layer_may_have_beside_them(arch: str) -> None:
    """Biases, shared experts, a ring, an intermediate size that is padded, NaN in a token."""
    shape = replace(
        SHAPE, intermediate_hidden=160, biases=True, num_shared_experts=1, num_pool_tokens=384
    )
    tokens = put_nan(exact_tokens(shape, 140, seed=2), 1, seed=2)
    (result,) = exact_case(shape, arch=arch).compare_call([tokens])
    assert result.is_right, result
    assert result.num_equal == result.num_values - shape.hidden  # NaN equals nothing


def test_exact_with_hoppers_sums() -> None:
    tokens = exact_tokens(SHAPE, 40, seed=6)
    (result,) = exact_case(SHAPE, sum_bits=13).compare_call([tokens], hopper_fp8_sums=True)
    assert result.is_exact, result


@pytest.mark.parametrize("scale_block", [WHOLE_ROW, WHOLE_MATRIX], ids=["rows", "matrices"])
@pytest.mark.parametrize(
    ("arch", "hopper_fp8_sums"), [("sm_90a", False), ("sm_90a", True), ("sm_100a", False)]
)
def test_scales_that_are_no_powers_of_two(
    scale_block: tuple[int, int], arch: str, hopper_fp8_sums: bool
) -> None:
    case = random_case(scale_block=scale_block, arch=arch)
    tokens = random_tokens(SHAPE, 40, seed=1)
    for scales in (tokens.x_sf, case.layer.l1.sf):
        assert bool((scales.view(torch.int32) & 0x7FFFFF).all())
    (result,) = case.compare_call([tokens], hopper_fp8_sums=hopper_fp8_sums)
    assert result.is_right, result


@on_each
def test_gate_and_up_have_their_own(arch: str) -> None:
    """With the larger of both for both, or with those of the other, results would be wrong."""
    made = random_layer(SHAPE, scale_block=WHOLE_MATRIX)
    l1 = LayerWeights(made.l1.weight, made.l1.sf * torch.tensor([1.0, 3.0]))
    case = LayerCase(SHAPE, Layer(l1, made.l2), arch=arch)
    tokens = random_tokens(SHAPE, 30, seed=3)
    (y,) = case.call([tokens])
    (bounds,) = case.bounds([tokens])
    assert compare(y, bounds).is_right
    for other in (l1.sf.amax(dim=1, keepdim=True).expand(-1, 2), l1.sf.flip(1)):
        case.layer = Layer(LayerWeights(l1.weight, other), made.l2)
        (bounds,) = case.bounds([tokens])
        assert not compare(y, bounds).is_right


def test_blocks_of_linear1s_output_with_scales_of_their_own() -> None:
    """So far apart that Linear2's sums change scales on the way."""
    shape = replace(SHAPE, intermediate_hidden=512)
    made = random_layer(shape, scale_block=WHOLE_ROW)
    factors = torch.exp2(torch.tensor([0.0, 9.0, -12.0, 3.0, -2.0, 5.0, 0.0, -8.0]))
    l1 = LayerWeights(made.l1.weight, made.l1.sf * factors.repeat_interleave(128))
    case = LayerCase(shape, Layer(l1, made.l2), arch="sm_90a")
    (result,) = case.compare_call([random_tokens(shape, 30, seed=2)])
    assert result.is_right, result


@on_each
@pytest.mark.parametrize("which", ["row", "token"])
def test_a_scale_of_another_would_be_noticed(which: str, arch: str) -> None:
    case = random_case(arch=arch)
    tokens = random_tokens(SHAPE, 20, seed=4)
    (y,) = case.call([tokens])
    if which == "row":
        case.layer.l1.sf[:, 7] *= 1.5
    else:
        tokens.x_sf[3] *= 1.5
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


@on_each
def test_prepared_inputs(arch: str) -> None:
    """Of two ranks, one call after the other. Two warps prepare a token."""
    shape = replace(SHAPE, num_ranks=2, num_max_tokens_per_rank=40, hidden=1152)
    case = random_case(shape, arch=arch)
    for counts in ((17, 5), (0, 30)):
        tokens = []
        for buffer, count in zip(case.ranks.buffers, counts, strict=True):
            own = random_tokens(shape, count, seed=count)
            x = torch.randn(count, shape.hidden, generator=torch.Generator().manual_seed(count))
            if count > 2:
                x[1], x[2, 200] = 0.0, torch.inf
            deep_moe.prepare_inputs(x.bfloat16(), own.topk_idx, own.topk_weights, buffer, arch=arch)
            values, scales = quantize_e4m3_float(x.bfloat16(), whole_tokens=True)
            assert torch.equal(buffer.x[:count].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(buffer.x_sf[:count], scales)
            tokens.append(replace(own, x=values, x_sf=scales))
        results = case.compare_call(tokens)
        assert all(result.is_right for result in results), results


@pytest.mark.parametrize(
    ("arch", "weights", "allowed"),
    [
        ("sm_100a", "mxfp4", "mxfp8 or bf16"),
        ("sm_90a", "mxfp4", "mxfp8 or bf16"),
        ("sm_90a", "bf16", "bf16"),
    ],
)
def test_who_does_not_take_them(arch: str, weights: str, allowed: str) -> None:
    words = f"token_format must be {allowed} with {weights} weights on {arch}; got '{ONE_SCALE}'"
    with pytest.raises(ValueError, match=words):
        choose_config(replace(SHAPE, weights=weights), 1, arch=arch)


def test_the_buffer() -> None:
    sizes = (4, 16, 2, 384, 256)
    formats = {"weights": "fp8", "token_format": ONE_SCALE}
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, *sizes, **formats, device="cpu")
    assert (buffer.x_sf.dtype, buffer.x_sf.shape) == (torch.float32, (16, 1))
    assert buffer.nbytes == deep_moe.buffer_size(1, *sizes, **formats)
    assert "fp8 weights, fp8_token tokens" in repr(buffer)
    with pytest.raises(ValueError, match="hidden must be a multiple of 128 with token_format"):
        replace(SHAPE, hidden=352)


def test_sm100_loads_no_scales_but_those_of_linear1s_output() -> None:
    config = choose_config(SHAPE, 200, arch="sm_100a")
    layout = config.smem_layout
    assert layout["weight_sf"].shape == (1, 1, 128)
    assert layout["activation_sf"].shape[0] == config.num_stages > 1
    assert "amax_exchange" in {segment.name for segment in layout.segments}


def test_tiles_and_shared_memory() -> None:
    config = choose_config(SHAPE, 200, arch="sm_90a")
    layout = config.smem_layout
    names = {segment.name for segment in layout.segments}
    assert layout["weight_blocks"].shape == (config.num_stages, 32768)
    assert names >= {"row_factors", "l1_token_factors", "rescale_factors", "amax_exchange"}
    assert not names & {"weight_scales", "token_scales"}
    assert config.num_mmas_per_group == 4
    choose_config(SHAPE, 200, arch="sm_90a", overrides={"block_m": 176})
