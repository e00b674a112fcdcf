"""Sizes that are no multiples of 128: padded in weights and buffers, true in what callers see."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.heuristics import MoEShape, choose_config, preset_shape
from deep_moe.trial.synthetic import (
    exact_layer,
    exact_tokens,
    random_layer,
    random_tokens,
)

from .layer_case import LayerCase

ARCHS = ("sm_90a", "sm_100a")
each_arch = pytest.mark.parametrize("arch", ARCHS)


def shape_of(hidden: int, intermediate: int, num_ranks: int = 1, biases: bool = False) -> MoEShape:
    return MoEShape(num_ranks, 4, 2, hidden, intermediate, 50, biases=biases)


@each_arch
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), [(352, 160), (96, 288), (384, 224)])
def test_exact_layer(arch: str, hidden: int, intermediate: int, biases: bool) -> None:
    shape = shape_of(hidden, intermediate, biases=biases)
    case = LayerCase(shape, exact_layer(shape), arch=arch)
    (result,) = case.compare_call([exact_tokens(shape, 40, seed=3)])
    assert result.is_exact, result


@each_arch
def test_random_layer_is_right(arch: str) -> None:
    shape = shape_of(352, 160, biases=True)
    case = LayerCase(shape, random_layer(shape), arch=arch)
    (result,) = case.compare_call([random_tokens(shape, 30, seed=1)])
    assert result.is_right, result


@each_arch
def test_prepared_inputs_of_two_ranks(arch: str) -> None:
    """Whose rows in the buffer are longer than theirs."""
    shape = shape_of(352, 160, num_ranks=2)
    case = LayerCase(shape, exact_layer(shape), arch=arch)
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


@each_arch
@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 160), (352, 128)])
def test_the_inverse_gives_true_sizes(arch: str, hidden: int, intermediate: int) -> None:
    layer = random_layer(shape_of(hidden, intermediate))
    made = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch)
    empty = deep_moe.empty_weights_for_mega_moe(4, hidden, intermediate, arch=arch)
    for one, other in zip((*made.l1, *made.l2), (*empty.l1, *empty.l2), strict=True):
        assert one.shape == other.shape
    back = deep_moe.inverse_transform_weights(
        *made, arch, hidden=hidden, intermediate_hidden=intermediate
    )
    for one, other in zip((*layer.l1, *layer.l2), (*back.l1, *back.l2), strict=True):
        assert torch.equal(one, other)
    padded = deep_moe.inverse_transform_weights(*made, arch)
    assert padded.l2.weight.shape[1] == -(-hidden // 128) * 128
    with pytest.raises(ValueError, match=r"hidden must become .* when it is padded.*; got 1024"):
        deep_moe.inverse_transform_weights(*made, arch, hidden=1024)


def test_fp8_sizes_are_multiples_of_128() -> None:
    with pytest.raises(ValueError, match=r"hidden must be .* of 128 with fp8 weights; got 2880"):
        MoEShape(1, 4, 2, 2880, 2944, 16, weights="fp8")


@pytest.mark.parametrize("arch", [*ARCHS, "sm_103a"])
def test_gpt_oss(arch: str) -> None:
    shape = preset_shape("gpt-oss-120b", num_ranks=4, num_max_tokens_per_rank=64)
    config = choose_config(shape, 64, arch=arch, activation="swiglu_oai")
    assert (config.hidden, config.output_hidden, config.intermediate_hidden) == (2944, 2880, 2944)
    assert config.biases
    assert config.shape.hidden == 2880
    assert config.symm_buffer_layout["input_x_sf"].shape == (64, 23)
