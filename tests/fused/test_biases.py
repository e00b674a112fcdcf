"""Biases as arguments of a call: however it is made, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.fused.mega_moe import _mega_moe_op
from deep_moe.targets import target_of
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.pairs import formats

from .conftest import SHAPE, arch_with, fill

BIASED = dataclasses.replace(SHAPE, biases=True)


def buffer_of(shape: Any) -> deep_moe.SymmBuffer:
    return deep_moe.get_symm_buffer_for_mega_moe(None, **shape.buffer_arguments, device="cpu")


@pytest.mark.parametrize("pair", ["mxfp4", "fp8", "bf16", "mxfp4 x bf16", "nvfp4"])
@pytest.mark.parametrize("how", ["function", "operator"])
def test_they_are_added(pair: str, how: str) -> None:
    shape = dataclasses.replace(BIASED, **formats(pair))
    layer, tokens = exact_layer(shape), exact_tokens(shape, 9)
    arch = arch_with(**formats(pair))
    weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch, **formats(pair))
    l1_bias, l2_bias = deep_moe.transform_biases_for_mega_moe(
        layer.l1_bias, layer.l2_bias, arch, **formats(pair)
    )
    buffer = buffer_of(shape)
    assert buffer.shape == shape
    assert f"{shape.weights} weights, {shape.token_format} tokens with biases," in repr(buffer)
    fill(buffer, tokens)
    y = torch.full((9, shape.hidden), torch.nan, dtype=torch.bfloat16)
    if how == "function":
        deep_moe.mega_moe(y, weights, buffer, l1_bias=l1_bias, l2_bias=l2_bias, arch=arch)
    else:
        _mega_moe_op(
            y, *weights.tensors, buffer.handle, l1_bias=l1_bias, l2_bias=l2_bias, arch=arch
        )
    expected = reference_mega_moe(
        *layer.operands(tokens),
        numerics=target_of(arch).weights_of(**formats(pair)).numerics,
        **layer.biases,
    )
    assert torch.equal(y, expected)


def call(shape: Any, **biases: Any) -> None:
    layer = exact_layer(SHAPE)
    l1, l2 = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2)
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    deep_moe.fp8_fp4_mega_moe(y, l1, l2, buffer_of(shape), **biases)


L1, L2 = torch.zeros(4, 1, 256), torch.zeros(4, 1, 256)


@pytest.mark.parametrize(
    ("shape", "biases", "error", "message"),
    [
        (SHAPE, {"l1_bias": L1}, ValueError, "l1_bias must be None with a buffer made without"),
        (BIASED, {}, TypeError, "l1_bias must be a tensor of transform_biases.*got NoneType"),
        (BIASED, {"l1_bias": L1}, TypeError, "l2_bias must be a tensor of .*; got NoneType"),
        (
            BIASED,
            {"l1_bias": L1, "l2_bias": torch.zeros(4, 256)},
            ValueError,
            r"l2_bias must have shape \(4, 1, 256\) for this buffer; got \(4, 256\)",
        ),
        (
            BIASED,
            {"l1_bias": L1.bfloat16(), "l2_bias": L2},
            TypeError,
            "l1_bias must be torch.float32; got torch.bfloat16",
        ),
        (
            BIASED,
            {"l1_bias": L1, "l2_bias": L2[:, :, :1].expand(4, 1, 256)},
            ValueError,
            "l2_bias must be contiguous",
        ),
        (
            BIASED,
            {"l1_bias": torch.zeros(1025)[1:].view(4, 1, 256), "l2_bias": L2},
            ValueError,
            "l1_bias must start at a multiple of 16 bytes",
        ),
    ],
)
def test_what_is_refused(shape: Any, biases: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(shape, **biases)


def test_a_flag_is_a_bool() -> None:
    with pytest.raises(TypeError, match="biases must be a bool; got 1"):
        deep_moe.buffer_size(1, 4, 16, 2, 256, 128, biases=1)
    sizes = {deep_moe.buffer_size(1, 4, 16, 2, 256, 128, biases=flag) for flag in (False, True)}
    assert len(sizes) == 1
