"""INT4 and MXFP8 weights as checkpoints have them: what they stand for, what is refused."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.targets import target_of
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights, one_expert

INT4, MXFP8, FP8 = (weight_format(name) for name in ("int4", "mxfp8", "fp8"))
EXPERTS, HIDDEN, INTERMEDIATE = 3, 160, 96


def layers(weights: str, group: int = 32) -> tuple[LayerWeights, LayerWeights]:
    torch.manual_seed(0)
    quantize = weight_format(weights).quantize
    return (
        quantize(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), (1, group), 2),
        quantize(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE), (1, group), 1),
    )


def transform(l1, l2, weights: str = "int4", **more) -> deep_moe.MegaMoEWeights:
    return deep_moe.transform_weights_for_mega_moe(
        l1, l2, "sm_90a", weights=weights, token_format="bf16", **more
    )


@pytest.mark.parametrize("group", [32, 128])
def test_an_int4_value_is_code_less_8_times_its_scale(group: int) -> None:
    codes = torch.arange(160, dtype=torch.uint8).view(1, 160) % 16
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    sf = (torch.arange(-(-160 // group)) + 1.5).bfloat16().view(1, -1)
    expected = (codes.double() - 8) * (torch.arange(160) // group + 1.5).double()
    assert torch.equal(INT4.dequantize((packed, sf)), expected)


@pytest.mark.parametrize("group", [32, 128])
def test_quantizing_to_int4(group: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(EXPERTS, 64, 160)
    packed, sf = deep_moe.quantize_int4(x, group)
    assert packed.shape == (EXPERTS, 64, 80)
    assert sf.shape == (EXPERTS, 64, -(-160 // group))
    back = deep_moe.dequantize_int4(packed, sf)
    assert float((back - x).norm() / x.norm()) < (0.12 if group == 32 else 0.15)
    assert float(deep_moe.dequantize_int4(*deep_moe.quantize_int4(torch.zeros(4, 32))).max()) == 0
    with pytest.raises(ValueError, match="group_size must be 32 or 128; got 64"):
        deep_moe.quantize_int4(x, 64)


def test_the_kernel_rounds_code_times_scale_once_to_bf16() -> None:
    l1, _ = layers("int4")
    numerics = target_of("sm_90a").weights_of("int4").numerics
    one = one_expert(l1, 0)
    exact = INT4.dequantize(one, 2)
    rounded = numerics.weights(one, 2)
    assert torch.equal(rounded, exact.bfloat16().double())
    error = (rounded - exact).norm() / exact.norm()
    assert 0.0005 < float(error) < 0.003


@pytest.mark.parametrize("group", [32, 128])
def test_sizes_that_are_no_multiples_of_128_come_back(group: int) -> None:
    l1, l2 = layers("int4", group)
    back = deep_moe.inverse_transform_weights(
        *transform(l1, l2),
        "sm_90a",
        weights="int4",
        hidden=HIDDEN,
        intermediate_hidden=INTERMEDIATE,
    )
    for before, after in ((l1, back.l1), (l2, back.l2)):
        assert torch.equal(before.weight, after.weight)
        repeated = before.sf.repeat_interleave(group // 32, -1)[..., : after.sf.shape[-1]]
        assert torch.equal(repeated, after.sf)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, s: (w, s.float()), r"l1_weights\[1\] must be bfloat16"),
        (lambda w, s: (w.short(), s), r"l1_weights\[0\] must be int8 or uint8"),
        (lambda w, s: (w, s[..., :3]), r"l1_weights\[1\] must hold one scale per 32 .* or per 128"),
        (lambda w, s: (w, s * float("nan")), r"l1_weights\[1\]: expert 0, row 0 must have scales"),
        (lambda w, s: (w, s * 0 + 2.0**125), r"l1_weights: expert 0 must have scales of at most"),
    ],
)
def test_other_int4_weights_are_refused_by_name(change, words: str) -> None:
    l1, l2 = layers("int4")
    with pytest.raises((TypeError, ValueError), match=words):
        transform(change(*l1), l2)


def test_mxfp8_is_fp8_with_scales_per_32() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    layer = MXFP8.quantize(x)
    assert torch.equal(MXFP8.dequantize(layer), FP8.dequantize(layer))
    l1, l2 = layers("mxfp8")
    sm100 = deep_moe.transform_weights_for_mega_moe(
        l1, l2, "sm_100a", weights="mxfp8", token_format="mxfp8"
    )
    as_fp8 = deep_moe.transform_weights_for_mega_moe(l1, l2, "sm_100a", weights="fp8")
    assert all(map(torch.equal, sm100.tensors, as_fp8.tensors))
    assert sm100.weights == "mxfp8"


def test_mxfp8_scales_of_other_blocks_are_refused() -> None:
    l1, l2 = layers("mxfp8")
    with pytest.raises(TypeError, match=r"l1_weights\[1\] must be float8_e8m0fnu, uint8, or int32"):
        transform((l1.weight, torch.ones(EXPERTS, 192, 5)), l2, "mxfp8")
    with pytest.raises(ValueError, match=r"l1_weights\[1\] must hold one scale per 32 values"):
        transform((l1.weight, torch.ones(EXPERTS, 2, 2, dtype=torch.uint8)), l2, "mxfp8")


def test_an_mxfp8_row_that_spreads_too_far_is_refused() -> None:
    l1, l2 = layers("mxfp8")
    scales = l1.sf.view(torch.uint8)
    scales[...] = 120
    scales[1, 7, 2] = 120 - 117
    transform(l1, l2, "mxfp8")
    scales[1, 7, 2] -= 1
    words = r"l1_weights: expert 1, row 7 must have scales within a factor of 2\^117 .* 2\^-125 to"
    with pytest.raises(ValueError, match=words):
        transform(l1, l2, "mxfp8")
    l1.weight.view(torch.uint8)[1, 7, 64:96] = 0x80  # -0 fits any scale
    transform(l1, l2, "mxfp8")
