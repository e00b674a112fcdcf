"""FP8 weights and tokens that have float32 scales: blocks and groups of 128 on SM90, or scales of
rows or matrices beside one of each token, both factors of complete sums."""

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

SHAPE = MoEShape(1, 4, 2, 384, 256, 200, weights="fp8", token_format="fp8_token")
OF_128 = replace(SHAPE, token_format="fp8_128")
SHAPES = {shape.token_format: shape for shape in (SHAPE, OF_128)}
BLOCKS = {"fp8_token": WHOLE_ROW, "fp8_128": (128, 128)}

on_each = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
each_tokens = pytest.mark.parametrize("tokens", SHAPES)
each_kernel = pytest.mark.parametrize(
    ("arch", "tokens"),
    [("sm_90a", "fp8_token"), ("sm_100a", "fp8_token"), ("sm_90a", "fp8_128")],
)


def exact_case(shape: MoEShape, sum_bits: int = 24, arch: str = "sm_90a") -> LayerCase:
    layer = exact_layer(shape, sum_bits=sum_bits, scale_block=BLOCKS[shape.token_format])
    return LayerCase(shape, layer, arch=arch)


def random_case(
    shape: MoEShape = SHAPE, scale_block: tuple[int, int] | None = None, arch: str = "sm_90a"
) -> LayerCase:
    block = scale_block or BLOCKS[shape.token_format]
    return LayerCase(shape, random_layer(shape, scale_block=block), arch=arch)


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


@pytest.mark.parametrize("block_m", [8, 40, 88, 112, 128])
def test_tiles_with_one_and_two_sets_of_products(block_m: int) -> None:
    tokens = exact_tokens(OF_128, block_m + 5, seed=block_m)
    (result,) = exact_case(OF_128).compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@each_kernel
def test_all_that_a_layer_may_have_beside_them(arch: str, tokens: str) -> None:
    """Biases, shared experts, a ring, an intermediate size that is padded, NaN in a token."""
    shape = replace(
        SHAPES[tokens],
        intermediate_hidden=160,
        biases=True,
        num_shared_experts=1,
        num_pool_tokens=384,
    )
    own = put_nan(exact_tokens(shape, 140, seed=2), 1, seed=2)
    overrides = {"block_m": 40} if tokens == "fp8_128" else {}
    (result,) = exact_case(shape, arch=arch).compare_call([own], overrides=overrides)
    assert result.is_right, result
    assert result.num_equal == result.num_values - shape.hidden  # NaN equals nothing


@each_tokens
def test_exact_with_hoppers_sums(tokens: str) -> None:
    shape = SHAPES[tokens]
    own = exact_tokens(shape, 40, seed=6)
    (result,) = exact_case(shape, sum_bits=13).compare_call([own], hopper_fp8_sums=True)
    assert result.is_exact, result


@pytest.mark.parametrize(
    ("tokens", "scale_block", "arch", "hopper_fp8_sums"),
    [
        *(("fp8_128", (128, 128), "sm_90a", hopper) for hopper in (False, True)),
        *(
            ("fp8_token", block, *kernel)
            for block in (WHOLE_ROW, WHOLE_MATRIX)
            for kernel in (("sm_90a", False), ("sm_90a", True), ("sm_100a", False))
        ),
    ],
)
def test_scales_that_are_no_powers_of_two(
    tokens: str, scale_block: tuple[int, int], arch: str, hopper_fp8_sums: bool
) -> None:
    case = random_case(SHAPES[tokens], scale_block, arch)
    own = random_tokens(case.shape, 40, seed=1)
    for scales in (own.x_sf, case.layer.l1.sf):
        assert bool((scales.view(torch.int32) & 0x7FFFFF).all())
    (result,) = case.compare_call([own], hopper_fp8_sums=hopper_fp8_sums)
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


def test_rounding_scales_of_tokens_to_powers_of_two_would_be_noticed() -> None:
    case = random_case(OF_128)
    tokens = random_tokens(OF_128, 40, seed=1)
    rounded = replace(tokens, x_sf=tokens.x_sf.log2().round().exp2())
    (y,) = case.call([rounded])
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


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


@each_kernel
def test_prepared_inputs(arch: str, tokens: str) -> None:
    """Of two ranks, one call after the other. Two warps prepare a token of 1152 values."""
    has_one = tokens == "fp8_token"
    shape = replace(
        SHAPES[tokens],
        num_ranks=2,
        num_max_tokens_per_rank=40,
        hidden=1152 if has_one else 384,
    )
    case = random_case(shape, arch=arch)
    for counts in ((17, 5), (0, 30)):
        given = []
        for buffer, count in zip(case.ranks.buffers, counts, strict=True):
            own = random_tokens(shape, count, seed=count)
            x = torch.randn(count, shape.hidden, generator=torch.Generator().manual_seed(count))
            if count > 2:
                x[1], x[2, :128] = 0.0, 1e-6
                x[2, 200] = torch.inf
            deep_moe.prepare_inputs(x.bfloat16(), own.topk_idx, own.topk_weights, buffer, arch=arch)
            values, scales = quantize_e4m3_float(x.bfloat16(), whole_tokens=has_one)
            assert torch.equal(buffer.x[:count].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(buffer.x_sf[:count], scales)
            given.append(replace(own, x=values, x_sf=scales))
        results = case.compare_call(given)
        assert all(result.is_right for result in results), results


@pytest.mark.parametrize(
    ("tokens", "arch", "weights", "allowed"),
    [
        ("fp8_token", "sm_100a", "mxfp4", "mxfp8 or bf16"),
        ("fp8_token", "sm_90a", "mxfp4", "mxfp8 or bf16"),
        ("fp8_token", "sm_90a", "bf16", "bf16"),
        ("fp8_128", "sm_100a", "fp8", "mxfp8 or fp8_token"),
        ("fp8_128", "sm_103a", "fp8", "mxfp8 or fp8_token"),
        ("fp8_128", "sm_90a", "mxfp4", "mxfp8 or bf16"),
        ("fp8_128", "sm_90a", "bf16", "bf16"),
    ],
)
def test_who_does_not_take_them(tokens: str, arch: str, weights: str, allowed: str) -> None:
    words = f"token_format must be {allowed} with {weights} weights on {arch}; got '{tokens}'"
    with pytest.raises(ValueError, match=words):
        choose_config(replace(SHAPES[tokens], weights=weights), 1, arch=arch)


def test_a_call_for_another_target_is_refused() -> None:
    case = exact_case(OF_128)
    case.arch = "sm_100a"
    words = (
        r"weights\[0\] must be fp8 weights beside fp8_128 tokens for sm100, .* laid out for sm90"
    )
    with pytest.raises(ValueError, match=words):
        case.call([exact_tokens(OF_128, 3)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_format": "float32"}, "token_format must be one of mxfp8, fp8_128_ue8m0"),
        (
            {"token_format": "fp8_128_pow2"},
            "token_format must be one that products take, as 'mxfp8'",
        ),
        ({"hidden": 352}, "hidden must be a multiple of 128 with token_format fp8_128"),
        (
            {"hidden": 352, "token_format": "fp8_token"},
            "hidden must be a multiple of 128 with token_format",
        ),
    ],
)
def test_what_is_refused_for_any_target(change: dict[str, str | int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(OF_128, **change)


@pytest.mark.parametrize(("tokens", "num_scales"), [("fp8_token", 1), ("fp8_128", 3)])
def test_the_buffer(tokens: str, num_scales: int) -> None:
    sizes = (4, 16, 2, 384, 256)
    own = {"weights": "fp8", "token_format": tokens}
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, *sizes, **own, device="cpu")
    assert (buffer.x_sf.dtype, buffer.x_sf.shape) == (torch.float32, (16, num_scales))
    assert buffer.nbytes == deep_moe.buffer_size(1, *sizes, **own)
    assert f"fp8 weights, {tokens} tokens" in repr(buffer)


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
