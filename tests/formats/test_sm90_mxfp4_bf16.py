"""What only MXFP4 weights have as SM90 reads them for BF16 tokens: scales that fit into a row. The
rest stands in test_sm90_decoded.py."""

from __future__ import annotations

import pytest
import torch

from deep_moe.formats.block_scaled import dequantize_e2m1_ue8m0, pack_ue8m0
from deep_moe.weights.layers import LayerWeights, MegaMoEWeights
from deep_moe.weights.mxfp4.sm90_bf16_blocks import SCALES
from deep_moe.weights.transform import (
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)

from .test_sm90_decoded import HIDDEN, INTERMEDIATE, check_decoded

MAX_SPREAD = SCALES.max_spread


def layer_between(low: int, high: int, num_experts: int = 2) -> list[LayerWeights]:
    """Random E2M1 codes with UE8M0 bytes from `low` to `high`."""
    torch.manual_seed(low)
    sizes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return [
        LayerWeights(
            torch.randint(-128, 128, (num_experts, rows, values // 2), dtype=torch.int8),
            pack_ue8m0(
                torch.randint(low, high + 1, (num_experts, rows, values // 32)).to(torch.uint8)
            ),
        )
        for rows, values in sizes
    ]


def transform(layer: list[LayerWeights]) -> MegaMoEWeights:
    return transform_weights_for_mega_moe(*layer, "sm_90a", weights="mxfp4", token_format="bf16")


def inverse(weights: MegaMoEWeights) -> MegaMoEWeights:
    return inverse_transform_weights(*weights, "sm_90a", weights="mxfp4", token_format="bf16")


@pytest.mark.parametrize("is_l1", [True, False], ids=["l1", "l2"])
@pytest.mark.parametrize("spread", [0, 3, MAX_SPREAD])
def test_every_value_decodes_exactly_at_its_place(is_l1: bool, spread: int) -> None:
    layer = layer_between(60, 60 + spread, num_experts=1)
    check_decoded("mxfp4", layer, is_l1)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 125), (100, 126), (129, 254), (254, 254)])
def test_inverse_gives_the_input_back_over_the_whole_range(low: int, high: int) -> None:
    layer = layer_between(low, high)
    transformed = transform(layer)
    assert transformed.l1.sf.isfinite().all()
    for before, after in zip(layer, inverse(transformed), strict=True):
        assert torch.equal(before.weight, after.weight)
        assert torch.equal(before.sf, after.sf)


def test_zeros_fit_any_scale() -> None:
    layer = layer_between(200, 210, num_experts=1)
    layer[0].weight[:, ::3, 16:32] = 0
    scales = layer[0].sf.view(torch.uint8)
    scales[:, ::3, 1] = 0
    restored = inverse(transform(layer))
    assert torch.equal(restored.l1.weight, layer[0].weight)
    assert torch.equal(
        dequantize_e2m1_ue8m0(*restored.l1, torch.float64),
        dequantize_e2m1_ue8m0(*layer[0], torch.float64),
    )


@pytest.mark.parametrize(("layer_idx", "row"), [(0, 300), (1, 383)])
def test_a_row_that_spreads_too_far_is_refused(layer_idx: int, row: int) -> None:
    layer = layer_between(120, 120)
    layer[layer_idx].weight.bitwise_or_(0x11)  # no zeros
    scales = layer[layer_idx].sf.view(torch.uint8)
    scales[1, row, 2] += MAX_SPREAD
    transform(layer)
    scales[1, row, 2] += 1
    name = ("l1_weights", "l2_weights")[layer_idx]
    with pytest.raises(ValueError, match=rf"{name}: expert 1, row {row} .*2\^-7 to 2\^119"):
        transform(layer)
