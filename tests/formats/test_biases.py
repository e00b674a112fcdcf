"""Biases on their way to the kernel and back, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.targets import TARGETS
from tests.pairs import formats, usual_pairs


def biases(num_experts: int, intermediate: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = num_experts * (2 * intermediate + hidden)
    numbers = torch.arange(1.0, count + 1)
    l1, l2 = numbers.split([num_experts * 2 * intermediate, num_experts * hidden])
    return l1.view(num_experts, -1), l2.view(num_experts, -1)


@pytest.mark.parametrize(
    ("arch", "weights"), [(name, pair) for name in TARGETS for pair in usual_pairs(name)]
)
@pytest.mark.parametrize(("intermediate", "hidden"), [(128, 128), (256, 384), (640, 256)])
def test_inverse(arch: str, intermediate: int, hidden: int, weights: str) -> None:
    l1, l2 = biases(3, intermediate, hidden)
    made = deep_moe.transform_biases_for_mega_moe(l1, l2, arch, **formats(weights))
    assert made.l1.shape == (3, 2 * intermediate // 256, 256)
    assert made.l2.shape == (3, -(-hidden // 256), 256)
    assert (made.l2.flatten(1) == 0).sum() == 3 * (-hidden % 256)
    back = deep_moe.inverse_transform_biases(
        *made, hidden=hidden, intermediate_hidden=intermediate, arch=arch, **formats(weights)
    )
    assert torch.equal(back.l1, l1)
    assert torch.equal(back.l2, l2)


def test_bfloat16_keeps_its_values() -> None:
    l1, l2 = (bias.bfloat16() for bias in biases(2, 128, 128))
    made = deep_moe.transform_biases_for_mega_moe(l1, l2, weights="mxfp4")
    assert made.l1.dtype == made.l2.dtype == torch.float32
    assert torch.equal(made.l2[:, 0, :128], l2.float())


def test_rows_of_gate_and_up_stand_as_those_of_the_weights() -> None:
    """On SM100 in runs of 8; on SM90 in the order of the row factors."""
    l1, l2 = biases(1, 256, 256)
    made = deep_moe.transform_biases_for_mega_moe(l1, l2, "sm_100a", weights="fp8")
    assert made.l1.flatten()[:17].tolist() == [*range(1, 9), *range(257, 265), 9]

    scales = torch.randint(100, 130, (1, 512, 1), dtype=torch.uint8).expand(1, 512, 4)
    weight = torch.full((1, 512, 64), 0x22, dtype=torch.int8)
    l2_weight = torch.full((1, 128, 128), 0x22, dtype=torch.int8)
    l1_weights = (weight, scales.contiguous().view(torch.int32))
    l2_weights = (l2_weight, torch.full((1, 128, 2), 0x7F7F7F7F, dtype=torch.int32))
    laid_out = deep_moe.transform_weights_for_mega_moe(l1_weights, l2_weights, "sm_90a")
    as_biases = torch.exp2(scales[:, :, 0].float() - 127 + 13)
    made = deep_moe.transform_biases_for_mega_moe(
        as_biases, torch.zeros(1, 128), "sm_90a", weights="mxfp4"
    )
    assert torch.equal(made.l1, laid_out.l1.sf)


def test_rows_stand_as_those_of_bf16_weights_on_sm90() -> None:
    """Every first value of a row, of layers whose rows hold one number each."""
    l1, l2 = (bias.bfloat16() for bias in biases(1, 128, 128))
    weights = (l1.unsqueeze(2).repeat(1, 1, 128), l2.unsqueeze(2).repeat(1, 1, 128))
    laid_out = deep_moe.transform_weights_for_mega_moe(*weights, "sm_90a", weights="bf16")
    made = deep_moe.transform_biases_for_mega_moe(l1, l2, "sm_90a", weights="bf16")
    for bias, layer in zip(made, laid_out, strict=True):
        rows = layer.weight.view(1, -1, 2, 256, 64)[:, :, 0, :, 0]
        assert torch.equal(bias.bfloat16(), rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_no_finite_number(which: int, value: float) -> None:
    given = biases(3, 128, 128)
    given[which][2, 77] = value
    with pytest.raises(
        ValueError,
        match=rf"l{which + 1}_bias: expert 2, row 77 must be a finite number; got {value}",
    ):
        deep_moe.transform_biases_for_mega_moe(*given, weights="mxfp4")


GOOD = torch.zeros(3, 256), torch.zeros(3, 128)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((None, GOOD[1]), TypeError, r"l1_bias must be a tensor \[E, 2\*I\]; got NoneType"),
        ((GOOD[0], GOOD[1].half()), TypeError, "l2_bias must be float32 or bfloat16; got torch.fl"),
        ((GOOD[0][0], GOOD[1]), ValueError, r"l1_bias must have shape \[E, 2\*I\]; got \(256,\)"),
        ((GOOD[0][:, 1:], GOOD[1]), ValueError, r"l1_bias must have shape .* got \(3, 255\)"),
        ((GOOD[0], GOOD[1][:2]), ValueError, "l2_bias must be of the 3 experts of l1_bias; got 2"),
        ((GOOD[0], GOOD[1].to("meta")), ValueError, "l2_bias must be on cpu like l1_bias"),
    ],
)
def test_what_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        deep_moe.transform_biases_for_mega_moe(*given, weights="mxfp4")


def test_the_inverse_refuses_other_forms() -> None:
    made = deep_moe.transform_biases_for_mega_moe(*GOOD, weights="mxfp4")
    with pytest.raises(ValueError, match=r"l2_bias must be float32 of shape \(3, 2, 256\), as"):
        deep_moe.inverse_transform_biases(
            *made, hidden=384, intermediate_hidden=128, weights="mxfp4"
        )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("weights", ["mxfp4", "fp8", "bf16"])
def test_another_default_device_changes_nothing(arch: str, weights: str) -> None:
    given = torch.randn(2, 256), torch.randn(2, 160)
    expected = deep_moe.transform_biases_for_mega_moe(*given, arch, weights=weights)
    with torch.device("meta"):
        made = deep_moe.transform_biases_for_mega_moe(*given, arch, weights=weights)
    for tensor, other in zip(made, expected, strict=True):
        assert torch.equal(tensor, other)
