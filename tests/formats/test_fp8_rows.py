"""FP8 weights with a scale for each row or matrix: what is taken, the layout for SM90, the way
back, and kernels that apply other scales."""

from __future__ import annotations

import re

import pytest
import torch

from deep_moe import (
    RequantizationWarning,
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights, MegaMoEWeights

HIDDEN, INTERMEDIATE = 384, 256
FP8 = weight_format("fp8")
ROW_SCALED = {"weights": "fp8", "token_format": "fp8_token"}


def checkpoint(
    scale_block: tuple[int, int] = WHOLE_ROW,
    num_experts: int = 2,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> tuple[LayerWeights, LayerWeights]:
    generator = torch.Generator().manual_seed(0)

    def linear(num_rows: int, num_columns: int, num_matrices: int) -> LayerWeights:
        # Sizes that differ from row to row, and from gate to up.
        size = torch.linspace(0.01, 10, num_rows).unsqueeze(1)
        values = torch.randn(num_experts, num_rows, num_columns, generator=generator)
        return FP8.quantize(values * size, scale_block, num_matrices)

    return linear(2 * intermediate, hidden, 2), linear(hidden, intermediate, 1)


def transformed(l1: LayerWeights, l2: LayerWeights, **options) -> MegaMoEWeights:
    return transform_weights_for_mega_moe(l1, l2, "sm_90a", **ROW_SCALED, **options)


def per_row(layer: LayerWeights) -> LayerWeights:
    num_rows = layer.weight.shape[1]
    return LayerWeights(layer.weight, layer.sf.repeat_interleave(num_rows // layer.sf.shape[1], 1))


def equal(one, other) -> bool:
    (l1, l2), (other_l1, other_l2) = one, other
    pairs = zip([*l1, *l2], [*other_l1, *other_l2], strict=True)
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )


def values(layer: LayerWeights, num_matrices: int) -> torch.Tensor:
    return torch.stack([FP8.dequantize(own, num_matrices) for own in zip(*layer, strict=True)])


def test_what_weights_stand_for() -> None:
    l1, l2 = checkpoint()
    expected = l1.weight.float().double() * l1.sf.double().unsqueeze(2)
    assert torch.equal(values(l1, 2), expected)
    l1, l2 = checkpoint(WHOLE_MATRIX)
    assert (tuple(l1.sf.shape), tuple(l2.sf.shape)) == ((2, 2), (2, 1))
    gate, up = values(l1, 2).chunk(2, dim=1)
    bytes_of_gate, bytes_of_up = l1.weight.float().double().chunk(2, dim=1)
    assert torch.equal(gate, bytes_of_gate * l1.sf[:, 0, None, None].double())
    assert torch.equal(up, bytes_of_up * l1.sf[:, 1, None, None].double())


@pytest.mark.parametrize("scale_block", [WHOLE_ROW, WHOLE_MATRIX])
def test_quantizing_takes_the_smallest_scale_that_holds_all(scale_block: tuple[int, int]) -> None:
    layer, _ = checkpoint(scale_block)
    matrices = layer.weight.float().unflatten(1, (layer.sf.shape[1], -1))
    assert (matrices.abs().amax(dim=(2, 3)) == 448).all()
    zeros = FP8.quantize(torch.zeros(1, 64, 128), scale_block, 2)
    assert (zeros.sf == 1).all()
    assert not zeros.weight.float().any()


def test_every_byte_and_factor_is_where_the_kernel_wants_it() -> None:
    made = checkpoint()
    result = transformed(*made)
    choose = torch.Generator().manual_seed(2)
    for is_l1, (weight, sf), (blocks, factors) in zip((True, False), made, result, strict=True):
        num_rows, num_columns = weight.shape[1:]
        for _ in range(300):
            sizes = (num_rows // 128, num_columns // 128, 4, 8, 2, 2, 128)
            part, k_block, w, r, b, h, k = (
                int(torch.randint(size, (1,), generator=choose)) for size in sizes
            )
            n, g = divmod(part, 2)
            if is_l1:
                row = h * INTERMEDIATE + 128 * n + 64 * g + 16 * w + 2 * r + b
            else:
                row = 128 * part + 32 * w + 4 * r + 2 * b + h
            slot = 128 * g + 64 * b + 16 * w + 8 * h + r
            address = 128 * slot + (k // 16 ^ slot % 8) * 16 + k % 16
            stored = blocks.view(torch.uint8)[:, n, k_block, address]
            assert torch.equal(stored, weight.view(torch.uint8)[:, row, 128 * k_block + k])
            assert torch.equal(factors[:, n, slot], sf[:, row])
    # Rows of a second half that do not exist.
    assert not result.l2.weight.view(torch.uint8)[:, -1, :, 128 * 128 :].any()
    assert not result.l2.sf[:, -1, 128:].any()


@pytest.mark.parametrize("scale_block", [WHOLE_ROW, WHOLE_MATRIX])
@pytest.mark.parametrize("intermediate", [INTERMEDIATE, 160])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_there_and_back(scale_block: tuple[int, int], intermediate: int, arch: str) -> None:
    made = checkpoint(scale_block, intermediate=intermediate)
    back = inverse_transform_weights(
        *transform_weights_for_mega_moe(*made, arch, **ROW_SCALED),
        arch,
        **ROW_SCALED,
        hidden=HIDDEN,
        intermediate_hidden=intermediate,
    )
    assert equal(back, tuple(map(per_row, made)))


def test_expert_by_expert() -> None:
    made = checkpoint()
    out = empty_weights_for_mega_moe(2, HIDDEN, INTERMEDIATE, arch="sm_90a", **ROW_SCALED)
    for i in range(2):
        one = slice(i, i + 1)
        l1, l2 = (LayerWeights(weight[one], sf[one]) for weight, sf in made)
        transformed(l1, l2, out=out.expert(i))
    assert equal(out, transformed(*made))


def test_scales_of_128_x_128_or_32_that_are_equal_along_rows_are_exact() -> None:
    l1, l2 = checkpoint(WHOLE_MATRIX)
    expected = transformed(l1, l2)
    for num_rows, num_columns in ((128, 128), (1, 32)):
        layers = [
            LayerWeights(
                own.weight,
                own.sf[..., :, None]
                .repeat_interleave(own.weight.shape[1] // own.sf.shape[1] // num_rows, 1)
                .repeat_interleave(own.weight.shape[2] // num_columns, 2),
            )
            for own in (l1, l2)
        ]
        assert equal(transformed(*layers), expected)


def test_others_are_refused_by_name_or_rounded_anew() -> None:
    l1, l2 = (
        FP8.quantize(values(own, 1).float(), (128, 128), 2 - idx)
        for idx, own in enumerate(checkpoint())
    )
    words = "l1_weights: expert 0, row 0 must have one scale for a kernel that applies it to whole"
    with pytest.raises(ValueError, match=words):
        transformed(l1, l2)
    with pytest.warns(RequantizationWarning, match="to a float32 scale for each row") as caught:
        result = transformed(l1, l2, requantize=True)
    assert [warning.message.layer for warning in caught] == ["l1_weights", "l2_weights"]
    back = inverse_transform_weights(*result, "sm_90a", **ROW_SCALED)
    for before, after, num_matrices in ((l1, back.l1, 2), (l2, back.l2, 1)):
        was = values(before, num_matrices)
        assert (values(after, num_matrices) - was).norm() < 0.04 * was.norm()


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("sm_90a", r"expert 0, block \[0, 0\] of 128 x 128 values must have one scale"),
        ("sm_100a", r"expert 0, scale \[0, 0\] must be a power of two"),
    ],
)
def test_kernels_that_apply_other_scales(arch: str, words: str) -> None:
    """Take them rounded anew, and where they can apply them as they are."""
    made = checkpoint()
    with pytest.raises(ValueError, match=words):
        transform_weights_for_mega_moe(*made, arch, weights="fp8")
    with pytest.warns(RequantizationWarning):
        transform_weights_for_mega_moe(*made, arch, weights="fp8", requantize=True)
    powers = [
        LayerWeights(weight, torch.exp2(sf.log2().round()))
        for weight, sf in checkpoint(WHOLE_MATRIX)
    ]
    result = transform_weights_for_mega_moe(*powers, arch, weights="fp8")
    back = inverse_transform_weights(*result, arch, weights="fp8")
    for before, after, num_matrices in zip(powers, back, (2, 1), strict=True):
        assert torch.equal(values(before, num_matrices), values(after, num_matrices))


@pytest.mark.parametrize(
    ("sf", "error", "words"),
    [
        (torch.ones(2, 384, dtype=torch.bfloat16), TypeError, "must be float32, float8_e8m0fnu"),
        (torch.ones(2, 384, dtype=torch.uint8), TypeError, "must be float32 where it holds one"),
        (
            torch.ones(2, 2),
            ValueError,
            "one scale per row, shape (2, 384), or per matrix, shape (2, 1); got (2, 2)",
        ),
        (torch.ones(2), ValueError, "per row, shape (2, 384), or per matrix, shape (2, 1); got (2"),
        (torch.full((2, 384), -1.0), ValueError, "expert 0, scale [0] must be a positive number"),
        (torch.full((2, 1), torch.nan), ValueError, "scale [0] must be a positive number; got nan"),
    ],
)
def test_scales_that_are_refused(sf: torch.Tensor, error: type[Exception], words: str) -> None:
    l1, (weight, _) = checkpoint()
    with pytest.raises(error, match=re.escape(words)):
        transformed(l1, LayerWeights(weight, sf))
