"""The reference of the SM90 kernel: where it differs from the formats' recipe, and by how much."""

import math

import pytest
import torch

from deep_moe.activations import Swiglu
from deep_moe.formats.block_scaled import (
    dequantize_e2m1_ue8m0,
    dequantize_e4m3_ue8m0,
    pack_ue8m0,
    quantize_e2m1_ue8m0,
    quantize_e4m3_ue8m0,
    unpack_ue8m0,
)
from deep_moe.formats.numerics import fold_token_scales
from deep_moe.targets import target_of
from deep_moe.trial.reference import expert_output, reference_mega_moe

MXFP8 = target_of("sm_100a").weights_of().numerics
SM90 = target_of("sm_90a").weights_of().numerics


def e4m3_nearest_even(value: float) -> float:
    """By the definition: 3 bits after the leading one, exponents from -6, steps of 2^-9 below."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(value)[1] - 1, -6)
    step = 2.0 ** (exponent - 3)
    return round(value / step) * step  # Python rounds halves to even


def test_folding_rounds_each_value_to_the_nearest_at_the_largest_scale():
    torch.manual_seed(0)
    x = torch.randn(40, 256).mul(torch.exp2(torch.randint(-12, 8, (40, 256)))).clamp(-400, 400)
    x = x.to(torch.float8_e4m3fn)
    scale_bytes = torch.randint(105, 130, (40, 8), dtype=torch.uint8)
    scale_bytes[0] = 0
    scale_bytes[1] = 254
    folded = fold_token_scales(x, pack_ue8m0(scale_bytes)).tolist()
    for row, values in enumerate(x.double().tolist()):
        largest = int(scale_bytes[row].max())
        for k, value in enumerate(values):
            ratio = 2.0 ** (int(scale_bytes[row, k // 32]) - largest)
            assert folded[row][k] == e4m3_nearest_even(value * ratio) * 2.0 ** (largest - 127)


def test_folding_changes_nothing_where_nothing_becomes_subnormal():
    torch.manual_seed(0)
    x, sf = quantize_e4m3_ue8m0(torch.rand(16, 512) + 0.5)
    assert len(unpack_ue8m0(sf).unique()) == 1
    assert torch.equal(fold_token_scales(x, sf), dequantize_e4m3_ue8m0(x, sf, torch.float64))


def test_a_nan_stays_in_its_token():
    x, sf = quantize_e4m3_ue8m0(
        torch.tensor([1.0, math.inf, 1.0]).repeat_interleave(128).view(3, 128)
    )
    folded = fold_token_scales(x, sf)
    assert folded[1].isnan().all()
    assert folded[[0, 2]].isfinite().all()
    assert fold_token_scales(x[:1], torch.full_like(sf[:1], -1)).isnan().all()  # byte 255


def smallest_scale(block: list[float]) -> float:
    mantissa, exponent = math.frexp(max(abs(value) for value in block) / 448)
    return 2.0 ** (exponent - (mantissa == 0.5))


def test_requantizing_takes_the_scale_of_the_routing_weight_where_a_block_lies_well_in_it():
    torch.manual_seed(0)
    weights = torch.rand(60) * torch.exp2(torch.randint(-6, 7, (60,)).float()) + 2.0**-7
    sizes = torch.exp2(torch.randint(-12, 12, (60, 3)).float()).repeat_interleave(128, dim=1)
    activated = torch.randn(60, 384) * sizes * weights.unsqueeze(1)
    activated[0, :128] = 0
    result = SM90.requantize(activated, weights)
    num_common = 0
    for row, values in enumerate(activated.double().tolist()):
        common = 2.0 ** (math.floor(math.log2(weights[row])) - 1)
        for start in range(0, 384, 128):
            block = values[start : start + 128]
            amax = max(abs(value) for value in block)
            fits = amax == 0 or common / 8 <= amax <= 448 * common
            num_common += fits
            scale = common if fits else smallest_scale(block)
            expected = [e4m3_nearest_even(value / scale) * scale for value in block]
            assert result[row, start : start + 128].tolist() == expected
    assert 30 < num_common < 150  # of 180: both kinds


@pytest.mark.parametrize("weight", [0.0, -0.0, 2.0**-140, -3.0, 2.0**127, math.inf, math.nan])
def test_any_routing_weight_gives_a_scale(weight: float):
    """A scale that cannot be had is a matter of the block's own; what is not finite stays so."""
    torch.manual_seed(0)
    activated = torch.randn(1, 128)
    result = SM90.requantize(activated, torch.tensor([weight]))
    error = (result - activated).norm() / activated.norm()
    assert error < 0.04


def test_blocks_at_the_edge_of_the_common_scale_lose_little():
    """The smallest block that keeps its token's scale: its error is a tenth more than elsewhere."""
    torch.manual_seed(0)
    block = torch.randn(400, 128)
    block *= (2.0**-3 / 2) * 1.01 / block.abs().amax(dim=1, keepdim=True)  # weight 1: scale 1/2
    errors = [
        (SM90.requantize(factor * block, torch.ones(400)) - factor * block).norm()
        / (factor * block).norm()
        for factor in (1.0, 64.0)
    ]
    assert errors[0] < 1.25 * errors[1]


def test_scales_have_a_floor_of_2_to_the_minus_60():
    activated = torch.zeros(1, 128)
    activated[0, 0], activated[0, 1] = 2.0**-66, 2.0**-80
    result = SM90.requantize(activated, torch.ones(1))[0]
    assert result[0] == 2.0**-66  # 2^-6 of the floor, still a normal number
    assert result[1] == 0.0


def test_infinities_become_nan():
    activated = torch.ones(2, 256)
    activated[0, 3] = math.inf
    result = SM90.requantize(activated, torch.ones(2))
    assert result[0, :128].isnan().all()
    assert result[0, 128:].isfinite().all()
    assert result[1].isfinite().all()


def test_the_reference_of_each_architecture_can_be_chosen():
    """What is 2^-16 of a token's largest value is lost on SM90, which only shows if nothing else
    counts."""
    torch.manual_seed(0)
    dense = torch.randn(1, 512, 256) / 16
    dense[..., :32] = 0
    l1 = quantize_e2m1_ue8m0(dense)
    l2 = quantize_e2m1_ue8m0(torch.randn(1, 256, 256) / 16)
    values = torch.randn(8, 256)
    values[:, :32] *= 2.0**16
    x, sf = quantize_e4m3_ue8m0(values)
    inputs = (x, sf, torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1), l1, l2)
    default = reference_mega_moe(*inputs)
    sm90, sm100 = (target_of(arch).weights_of().numerics for arch in ("sm_90a", "sm_100a"))
    assert torch.equal(default, reference_mega_moe(*inputs, numerics=sm100))
    assert not torch.equal(default, reference_mega_moe(*inputs, numerics=sm90))


HIDDEN, INTERMEDIATE, NUM_TOKENS = 1024, 512, 128


def distribution(name: str) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(NUM_TOKENS, HIDDEN)
    if name == "outlier channels":
        x[:, ::64] *= 50
    elif name == "sizes differ by token":
        x *= torch.exp2(torch.randint(-8, 9, (NUM_TOKENS, 1)).float())
    elif name == "heavy tails":
        x = x / torch.randn(NUM_TOKENS, HIDDEN).abs().clamp(min=0.02)
    return x


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "name", ["normal", "outlier channels", "sizes differ by token", "heavy tails"]
)
def test_coarser_scales_cost_no_accuracy(name: str):
    """Against the layer without any rounding of activations: docs/numerics.md has the numbers."""
    x = distribution(name)
    l1 = quantize_e2m1_ue8m0(torch.randn(2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5)
    l2 = quantize_e2m1_ue8m0(torch.randn(HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5)
    w1, w2 = (dequantize_e2m1_ue8m0(*pair, torch.float64) for pair in (l1, l2))
    gate, up = (x.double() @ w1.T).chunk(2, dim=1)
    exact = (gate / (1 + torch.exp(-gate)) * up) @ w2.T

    quantized = quantize_e4m3_ue8m0(x)
    errors = {}
    for numerics in (MXFP8, SM90):
        tokens = numerics.tokens(*quantized)
        weights = torch.ones(NUM_TOKENS)
        y = expert_output(tokens, weights, l1, l2, activation=Swiglu(), numerics=numerics)
        errors[numerics] = relative_error(y.double(), exact)
    assert 0.02 < errors[MXFP8] < 0.1
    assert errors[SM90] < 1.02 * errors[MXFP8]
