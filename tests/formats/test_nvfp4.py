"""NVFP4 weights as checkpoints have them: what they stand for, what is refused."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights

FORMAT = weight_format("nvfp4")
EXPERTS, HIDDEN, INTERMEDIATE = 3, 160, 96
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def layers() -> tuple[LayerWeights, LayerWeights]:
    torch.manual_seed(0)
    return (
        FORMAT.quantize(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), num_matrices=2),
        FORMAT.quantize(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)),
    )


def transform(l1: LayerWeights, l2: LayerWeights) -> deep_moe.MegaMoEWeights:
    return deep_moe.transform_weights_for_mega_moe(l1, l2, "sm_90a", weights="nvfp4")


def test_a_value_is_code_times_scale_times_the_scale_of_its_matrix() -> None:
    """Low nibble first, 16 values to a scale, rows of gate before those of up."""
    packed = torch.arange(16, dtype=torch.uint8).view(1, 16).repeat(4, 1)
    packed = (packed[:, 0::2] | packed[:, 1::2] << 4).repeat(1, 2)
    sf = torch.tensor([[1.0, 448], [2**-9, 0], [1.125, 2**-6], [7 * 2**-9, 240]])
    layer = (packed, sf.to(torch.float8_e4m3fn), torch.tensor([3.0, 0.1]))
    expected = torch.cat([CODES, CODES]).double().expand(4, 32)
    expected = expected * sf.double().repeat_interleave(16, 1)
    expected = expected * torch.tensor([3.0, 3.0, 0.1, 0.1]).double().unsqueeze(1)
    assert torch.equal(FORMAT.dequantize(layer, 2), expected)


def test_quantizing_uses_the_whole_range_of_each_matrix() -> None:
    torch.manual_seed(0)
    x = torch.randn(EXPERTS, 64, 256) * torch.tensor([1.0, 50.0]).repeat_interleave(32).unsqueeze(1)
    layer = deep_moe.quantize_nvfp4(x, num_matrices=2)
    assert [tuple(own.shape) for own in layer] == [(EXPERTS, 64, 128), (EXPERTS, 64, 16), (3, 2)]
    largest = x.unflatten(1, (2, 32)).abs().amax(dim=(2, 3))
    assert torch.equal(layer.global_sf, largest / 2688)
    assert (layer.sf.float().unflatten(1, (2, 32)).amax(dim=(2, 3)) == 448).all()
    back = deep_moe.dequantize_nvfp4(*layer)
    assert float((back - x).norm() / x.norm()) < 0.1


@pytest.mark.parametrize("x", [torch.zeros(64, 64), torch.full((64, 64), 2.0**-149)])
def test_quantizing_what_is_all_but_nothing_gives_numbers(x: torch.Tensor) -> None:
    layer = deep_moe.quantize_nvfp4(x)
    assert all(own.float().isfinite().all() for own in layer)
    assert float(deep_moe.dequantize_nvfp4(*layer).abs().max()) <= 2.0**-149


@pytest.mark.parametrize(("byte", "what"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x80, "a sign")])
@pytest.mark.parametrize(("layer_idx", "row", "column"), [(0, 150, 3), (1, 7, 0)])
def test_scales_that_no_exporter_writes_are_refused_by_expert_and_row(
    byte: int, what: str, layer_idx: int, row: int, column: int
) -> None:
    both = layers()
    both[layer_idx].sf.view(torch.uint8)[1, row, column] = byte
    words = (
        rf"l{layer_idx + 1}_weights\[1\]: expert 1, row {row} must have scales .* got {what} "
        rf"\(E4M3 byte {byte:#04x}\) in column {column}"
    )
    with pytest.raises(ValueError, match=words):
        transform(*both)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_of_matrices_that_are_no_numbers_are_refused(value: float) -> None:
    l1, l2 = layers()
    l1.global_sf[2, 1] = value
    with pytest.raises(ValueError, match=r"l1_weights\[2\]: expert 2, matrix 1 must have a scale"):
        transform(l1, l2)


def test_a_scale_of_a_matrix_that_float32_cannot_hold_as_a_factor_is_refused() -> None:
    l1, l2 = layers()
    l2.global_sf[2, 0] = 2.0**121
    with pytest.raises(ValueError, match=r"l2_weights: expert 2 must have scales of matrices of"):
        transform(l1, l2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, s, g: (w, s), r"l1_weights must be three tensors .* got \(Tensor, Tensor\)"),
        (lambda w, s, g: (w.short(), s, g), r"l1_weights\[0\] must be int8 or uint8.*int16"),
        (lambda w, s, g: (w, s.float(), g), r"l1_weights\[1\] must be float8_e4m3fn.*float32"),
        (lambda w, s, g: (w, s[..., ::2], g), r"l1_weights\[1\] must hold one scale per 16"),
        (
            lambda w, s, g: (w, s, g[:, :1]),
            r"l1_weights\[2\] must hold one .* \(3, 2\); got \(3, 1",
        ),
        (lambda w, s, g: (w, s, g.double()), r"l1_weights\[2\] must be float32; got"),
    ],
)
def test_other_forms_are_refused_by_name(change, words: str) -> None:
    l1, l2 = layers()
    with pytest.raises((TypeError, ValueError), match=words):
        transform(change(*l1), l2)


def test_zero_scales_and_negative_zeros_give_zeros() -> None:
    """As older exporters write for dead blocks. Codes below a scale of zero are not kept."""
    l1, l2 = layers()
    l1.sf.view(torch.uint8)[0, ::3, 2] = 0
    l1.weight[0, ::3, 24:] = -120  # codes 8, which are -0
    l2.global_sf[1] = 0
    made = transform(l1, l2)
    back = deep_moe.inverse_transform_weights(
        *made, "sm_90a", weights="nvfp4", hidden=HIDDEN, intermediate_hidden=INTERMEDIATE
    )
    for before, after, num_matrices in ((l1, back.l1, 2), (l2, back.l2, 1)):
        for i in range(EXPERTS):
            expected, result = (
                FORMAT.dequantize(tuple(t[i] for t in own), num_matrices) for own in (before, after)
            )
            assert torch.equal(expected, result)
    assert (back.l2.global_sf[1] == 0).all()
