"""Sizes that are no multiples of 128: padded in weights and buffers, true in what callers see."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.formats.scale_blocks import over_values
from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.targets import choose_config, target_of
from deep_moe.tokens import token_format
from deep_moe.trial.synthetic import (
    exact_layer,
    exact_tokens,
    random_layer,
    random_tokens,
)
from deep_moe.weights import WEIGHTS
from tests.everyday import parametrize
from tests.pairs import formats, usual_pairs

from .layer_case import LayerCase

ARCHS = ("sm_90a", "sm_100a")
each_arch = pytest.mark.parametrize("arch", ARCHS)
# Beside tokens with float scales hidden is a multiple of 128.
KERNELS = [
    (name, pair)
    for name in ARCHS
    for pair in usual_pairs(name)
    if not token_format(formats(pair)["token_format"]).has_float_scales
]
each_kernel = pytest.mark.parametrize(("arch", "weights"), KERNELS)


def shape_of(
    hidden: int,
    intermediate: int,
    num_ranks: int = 1,
    biases: bool = False,
    weights: str = "mxfp4",
) -> MoEShape:
    return MoEShape(num_ranks, 4, 2, hidden, intermediate, 50, biases=biases, **formats(weights))


def scale_block(arch: str, weights: str) -> tuple[int, int]:
    return target_of(arch).weights_of(**formats(weights)).scale_block


@each_arch
@pytest.mark.parametrize("biases", [False, True])
@parametrize(("hidden", "intermediate"), [(352, 160), (96, 288), (384, 224)], everyday=[(352, 160)])
def test_exact_layer(arch: str, hidden: int, intermediate: int, biases: bool) -> None:
    shape = shape_of(hidden, intermediate, biases=biases)
    case = LayerCase(shape, exact_layer(shape), arch=arch)
    (result,) = case.compare_call([exact_tokens(shape, 40, seed=3)])
    assert result.is_exact, result


@parametrize(
    ("arch", "weights"),
    KERNELS,
    everyday=[("sm_90a", "fp8"), ("sm_90a", "mxfp4 x bf16"), ("sm_100a", "bf16")],
)
def test_random_layer_is_right(arch: str, weights: str) -> None:
    shape = shape_of(352, 160, biases=True, weights=weights)
    layer = random_layer(shape, scale_block=scale_block(arch, weights))
    case = LayerCase(shape, layer, arch=arch)
    (result,) = case.compare_call([random_tokens(shape, 30, seed=1)])
    assert result.is_right, result


@parametrize(
    ("arch", "weights"),
    [(name, pair) for name in ARCHS for pair in usual_pairs(name)],
    everyday=[("sm_90a", "nvfp4"), ("sm_100a", "nvfp4 x nvfp4")],
)
def test_the_width_of_gemma_4(arch: str, weights: str) -> None:
    """704, five and a half blocks."""
    shape = shape_of(128, 704, weights=weights)
    layer = random_layer(shape, scale_block=scale_block(arch, weights))
    case = LayerCase(shape, layer, arch=arch)
    (result,) = case.compare_call([random_tokens(shape, 9, seed=1)])
    assert result.is_right, result


@pytest.mark.parametrize("scale_block", [(1, 32), (128, 128)])
def test_fp8_on_sm100_takes_scales_of_both_kinds(scale_block: tuple[int, int]) -> None:
    shape = shape_of(352, 160, biases=True, weights="fp8")
    case = LayerCase(shape, exact_layer(shape, scale_block=scale_block), arch="sm_100a")
    (result,) = case.compare_call([exact_tokens(shape, 40, seed=3)])
    assert result.is_exact, result


def test_one_scale_in_each_block_is_found_beside_the_padding() -> None:
    """SM90 applies no scales per 32, unless a block has one, which its last blocks have, too."""
    shape = shape_of(352, 160, weights="fp8")
    blocks = exact_layer(shape, scale_block=(128, 128))

    def per_32(weight: torch.Tensor, sf: torch.Tensor, num_matrices: int) -> torch.Tensor:
        sizes = (weight.shape[1], weight.shape[2] // 32)
        return over_values(sf, (128, 4), *sizes, num_matrices)

    spread = [
        (layer.weight, per_32(*layer, num_matrices))
        for layer, num_matrices in ((blocks.l1, 2), (blocks.l2, 1))
    ]
    by_block, by_group = (
        deep_moe.transform_weights_for_mega_moe(*layers, "sm_90a", weights="fp8")
        for layers in ((blocks.l1, blocks.l2), spread)
    )
    for one, other in zip((*by_block.l1, *by_block.l2), (*by_group.l1, *by_group.l2), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@parametrize(("arch", "weights"), KERNELS, everyday=[("sm_90a", "mxfp4")])
def test_prepared_inputs_of_two_ranks(arch: str, weights: str) -> None:
    """Whose rows in the buffer are longer than theirs."""
    shape = shape_of(352, 160, num_ranks=2, weights=weights)
    case = LayerCase(shape, exact_layer(shape, scale_block=scale_block(arch, weights)), arch=arch)
    calls = [[exact_tokens(shape, n, seed=n) for n in counts] for counts in ((17, 5), (0, 30))]
    for of_call in case.compare_calls_in_a_row(calls):
        assert all(result.is_exact for result in of_call), of_call


def test_views_have_the_true_size_and_a_tail_of_zeros() -> None:
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 2880, 2880, device="cpu")
    assert buffer.x.shape == (16, 2880)
    assert buffer.x.stride() == (2944, 1)
    assert buffer.x_sf.shape == (16, 23)
    x = torch.randn(9, 2880).bfloat16()
    idx, weights = torch.zeros(9, 2, dtype=torch.int64), torch.ones(9, 2)
    deep_moe.prepare_inputs(x, idx, weights, buffer)
    values, sf = deep_moe.quantize_mxfp8(x)
    assert torch.equal(buffer.x[:9].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:9], sf)
    assert (sf.view(torch.uint8)[:, 90:] == 0).all()
    segment = buffer.layout["input_x"]
    rows = buffer.memory.tensor[segment.offset : segment.end].view(16, 2944)
    assert (rows[:, 2880:] == 0).all()


def test_bf16_rows_have_a_tail_of_zeros() -> None:
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, 4, 16, 2, 2880, 2880, weights="bf16", device="cpu"
    )
    x = torch.randn(9, 2880).bfloat16()
    idx, weights = torch.zeros(9, 2, dtype=torch.int64), torch.ones(9, 2)
    deep_moe.prepare_inputs(x, idx, weights, buffer)
    assert torch.equal(buffer.x[:9], x)
    assert buffer.x_sf.shape == (16, 0)
    segment = buffer.layout["input_x"]
    rows = buffer.memory.tensor[segment.offset : segment.end].view(torch.bfloat16).view(16, 2944)
    assert torch.equal(rows[:9, :2880], x)
    assert (rows[:, 2880:] == 0).all()


@each_kernel
@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 160), (352, 128)])
def test_the_inverse_gives_true_sizes(
    arch: str, weights: str, hidden: int, intermediate: int
) -> None:
    shape = shape_of(hidden, intermediate, weights=weights)
    layer = random_layer(shape, scale_block=scale_block(arch, weights))
    made = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch, **formats(weights))
    empty = deep_moe.empty_weights_for_mega_moe(
        4, hidden, intermediate, arch=arch, **formats(weights)
    )
    for one, other in zip((*made.l1, *made.l2), (*empty.l1, *empty.l2), strict=True):
        assert one.shape == other.shape
    back = deep_moe.inverse_transform_weights(
        *made, arch, **formats(weights), hidden=hidden, intermediate_hidden=intermediate
    )
    for one, other in zip((*layer.l1, *layer.l2), (*back.l1, *back.l2), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    padded = deep_moe.inverse_transform_weights(*made, arch, **formats(weights))
    assert padded.l2.weight.shape[1] == -(-hidden // 128) * 128
    with pytest.raises(ValueError, match=r"hidden must become .* when it is padded.*; got 1024"):
        deep_moe.inverse_transform_weights(*made, arch, **formats(weights), hidden=1024)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sizes_off_multiples_of_32_are_refused(weights: str) -> None:
    with pytest.raises(ValueError, match="hidden must be a positive multiple of 32; got 2888"):
        MoEShape(1, 4, 2, 2888, 2944, 16, **formats(weights))


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_blocks_of_gate_and_up_are_their_own(rows: int) -> None:
    """160 rows of gate have two blocks, and so have those of up; not three for all 320."""
    l1 = (torch.zeros(1, 320, 96).to(torch.float8_e4m3fn), torch.ones(1, rows, 1))
    l2 = (torch.zeros(1, 96, 160).to(torch.float8_e4m3fn), torch.ones(1, 1, 2))
    words = rf"per 128 x 128, shape \(1, 4, 1\), .*; got \(1, {rows}, 1\)"
    with pytest.raises(ValueError, match=words):
        deep_moe.transform_weights_for_mega_moe(l1, l2, "sm_90a", weights="fp8")


@pytest.mark.parametrize("arch", [*ARCHS, "sm_103a"])
def test_gpt_oss(arch: str) -> None:
    shape = preset_shape("gpt-oss-120b", num_ranks=4, num_max_tokens_per_rank=64)
    config = choose_config(shape, 64, arch=arch, activation="swiglu_oai")
    assert (config.hidden, config.output_hidden, config.intermediate_hidden) == (2944, 2880, 2944)
    assert config.biases
    assert config.shape.hidden == 2880
    assert config.symm_buffer_layout["input_x_sf"].shape == (64, 23)
