"""The bounds of right outputs: wide enough for what rounding does, and no wider."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deep_moe.activations import (
    Activation,
    GatedActivation,
    GeluTanh,
    Relu2,
    Situ,
    Swiglu,
    SwigluOai,
    SwigluStep,
)
from deep_moe.formats.block_scaled import (
    dequantize_e2m1_ue8m0,
    quantize_e2m1_ue8m0,
    quantize_e4m3_groups,
)
from deep_moe.formats.numerics import FP32_SUM_BITS, HOPPER_SUM_BITS, Numerics
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.trial.bounds import (
    Bounds,
    Interval,
    activated_ends,
    reference_bounds,
    sum_of_domains,
    sums_with_errors,
)
from deep_moe.trial.comparison import Comparison, compare
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import (
    Layer,
    Tokens,
    exact_layer,
    exact_tokens,
    random_layer,
    random_tokens,
)
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize
from tests.trial.random_layers import judge_layers, numerics_of, of_one_shape

MXFP8 = target_of("sm_100a").weights_of().numerics

# What runs where: the emulator with each architecture's rules, and SM90 on a GPU.
KINDS = (("sm_100a", FP32_SUM_BITS), ("sm_90a", FP32_SUM_BITS), ("sm_90a", HOPPER_SUM_BITS))
SHAPE = MoEShape(1, 4, 2, 512, 384, 24)
CLAMP = 2.0


def output(
    layer: Layer,
    tokens: Tokens,
    numerics: Numerics = MXFP8,
    activation_clamp: float | None = None,
) -> torch.Tensor:
    return reference_mega_moe(
        *layer.operands(tokens),
        numerics=numerics,
        activation_clamp=activation_clamp,
    )


def bounds(
    layer: Layer,
    tokens: Tokens,
    numerics: Numerics = MXFP8,
    sum_bits: int = FP32_SUM_BITS,
    activation_clamp: float | None = None,
) -> Bounds:
    return reference_bounds(
        *layer.operands(tokens),
        numerics=numerics,
        sum_bits=sum_bits,
        activation_clamp=activation_clamp,
    )


# ---- right results are right


@parametrize(
    ("arch", "hopper"),
    [("sm_100a", False), ("sm_90a", False), ("sm_90a", True)],
    everyday=[("sm_90a", True)],
)
def test_random_layers_of_the_emulated_kernel_are_right(arch: str, hopper: bool) -> None:
    """A sample of what docs/numerics.md tells of 2,000."""
    seen = judge_layers(range(8), arch, hopper_fp8_sums=hopper)
    assert seen.wrong == []
    assert (seen.num_different > 0) is hopper


OTHER_ACTIVATIONS = (
    *(SwigluOai(), SwigluOai(alpha=5.0, limit=0.7), Situ(), Situ(0.6, 0.9)),
    *(GeluTanh(), SwigluStep(), SwigluStep(0.7), Relu2()),
)


@pytest.mark.slow
@pytest.mark.parametrize("activation", OTHER_ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    ("arch", "hopper"), [("sm_100a", False), ("sm_90a", False), ("sm_90a", True)]
)
def test_random_layers_with_other_activations_are_right(
    arch: str, hopper: bool, activation: Activation
) -> None:
    numbers = of_one_shape(4)
    seen = judge_layers(numbers, arch, activation=activation, hopper_fp8_sums=hopper)
    assert seen.wrong == []
    assert seen.num_different == 0 or hopper


@pytest.mark.parametrize("activation", [Swiglu(), Swiglu(0.5), *OTHER_ACTIVATIONS], ids=str)
def test_ends_hold_the_formula_everywhere_between_and_the_approximations_round_it(
    activation: Activation,
) -> None:
    """Intervals of all sizes, with what FP32 makes of the formula inside; and not much wider."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        sizes = torch.exp2(torch.rand(4096, generator=generator) * 14 - 8)
        return (torch.randn(4096, generator=generator) * sizes).double()

    gate, up = numbers(), numbers()
    width = torch.exp2(-torch.rand(4096, generator=generator) * 20).double()
    width[:1024] = 0
    weight = torch.rand(4096, generator=generator) - 0.5
    rows, widths = (
        torch.stack([*(own[0],) * activation.has_gate, own[1]], dim=1)
        for own in ((gate, up), (width, width / 2))
    )
    ends = activated_ends(Interval(rows - widths, rows + widths), weight, activation)
    for gate_part, up_part in itertools.product(torch.linspace(-1, 1, 21), (-1.0, 0.0, 1.0)):
        parts = torch.stack([*(gate_part,) * activation.has_gate, torch.tensor(up_part)])
        exact = activation.of_linear1(rows + parts * widths) * weight.double().unsqueeze(1)
        assert ((ends.low <= exact) & (exact <= ends.high)).all()
    single = activation.of_linear1(rows[:1024].float()) * weight[:1024].unsqueeze(1)
    single = single.double()[:, 0]
    low, high = ends.low[:1024, 0], ends.high[:1024, 0]
    assert ((low <= single) & (single <= high)).all()
    is_near_zero = torch.ones(1024, dtype=torch.bool)
    if isinstance(activation, GatedActivation):
        is_near_zero = activation.sigmoid_argument(gate[:1024]) > -10
    assert ((high - low)[is_near_zero] <= 2e-5 * single[is_near_zero].abs() + 1e-30).all()


@pytest.mark.parametrize(("arch", "sum_bits"), KINDS)
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (Swiglu(), Situ()),
        (SwigluOai(), SwigluOai(alpha=1.5)),
        (SwigluOai(), SwigluOai(limit=1.5)),
        (SwigluOai(), Swiglu(7.0)),
        (Situ(), Situ(beta=3.0)),
        (Situ(linear_beta=3.0), Situ(linear_beta=4.0)),
        (GeluTanh(), SwigluOai(alpha=1.702, limit=100.0)),
        (SwigluStep(1.5), Swiglu(1.5)),
    ],
    ids=str,
)
def test_another_activation_is_seen(
    arch: str, sum_bits: int, mine: Activation, other: Activation
) -> None:
    """Each way: whichever of the two the kernel takes instead."""
    layer, tokens = random_layer(SHAPE, seed=1), random_tokens(SHAPE, 24, seed=1)
    inputs = layer.operands(tokens)
    numerics = numerics_of(arch)
    for right, wrong in ((mine, other), (other, mine)):
        of = reference_bounds(*inputs, numerics=numerics, sum_bits=sum_bits, activation=right)
        y = reference_mega_moe(*inputs, numerics=numerics, activation=wrong)
        assert not compare(y, of).is_right


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(12 * 3600)
@pytest.mark.parametrize(
    ("arch", "hopper"), [("sm_100a", False), ("sm_90a", False), ("sm_90a", True)]
)
def test_two_thousand_random_layers_are_right(arch: str, hopper: bool) -> None:
    assert judge_layers(range(2000), arch, hopper_fp8_sums=hopper).wrong == []


@pytest.mark.parametrize(("arch", "sum_bits"), KINDS)
def test_the_reference_itself_is_in_its_bounds(arch: str, sum_bits: int) -> None:
    layer, tokens = random_layer(SHAPE, seed=1), random_tokens(SHAPE, 24, seed=1)
    of = bounds(layer, tokens, numerics_of(arch), sum_bits)
    assert torch.equal(of.y, output(layer, tokens, numerics_of(arch)))
    assert compare(of.y, of).is_right


def test_tokens_with_nan_have_to_be_nan() -> None:
    layer, tokens = random_layer(SHAPE), random_tokens(SHAPE, 5)
    tokens.x.view(torch.uint8)[2, 7] = 0x7F
    of = bounds(layer, tokens)
    y = output(layer, tokens)
    assert y[2].isnan().all()
    assert compare(y, of).is_right
    y[2, 3] = 0.0
    assert not compare(y, of).is_right


def test_no_tokens_and_tokens_without_an_expert() -> None:
    layer = random_layer(SHAPE)
    nobody = random_tokens(SHAPE, 0)
    assert compare(output(layer, nobody), bounds(layer, nobody)).is_right
    idle = random_tokens(SHAPE, 3, num_unused_slots=2)
    y = torch.zeros(3, SHAPE.hidden, dtype=torch.bfloat16)
    assert compare(y, bounds(layer, idle)).is_right
    y[1, 5] = 2.0**-100
    assert not compare(y, bounds(layer, idle)).is_right


def on_a_boundary() -> tuple[Layer, Tokens]:
    """Two tokens of an exact layer with one expert. Before the routing weight all values of
    Linear1's output are E4M3 numbers. A weight of 17/16 takes powers of two to the middle between
    two, where the last bit of the SiLU decides."""
    shape = MoEShape(1, 1, 1, 512, 128, 2)
    tokens = exact_tokens(shape, 2, seed=5)
    weights = torch.tensor([[17 / 16], [1]])
    one = Tokens(
        tokens.x[:1].expand(2, -1), tokens.x_sf[:1].expand(2, -1), tokens.topk_idx, weights
    )
    return exact_layer(shape, seed=5, sum_bits=13), one


class OneFlip(Numerics):
    """Makes one value of Linear1's output, a power of two times the routing weight, another E4M3
    number: the next."""

    def requantize(self, activated: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        quantized = super().requantize(activated, weights)
        sizes = (activated / weights[:, None]).abs()
        mantissas, exponents = torch.frexp(sizes)
        column = int(((mantissas == 0.5).all(dim=0)).nonzero()[0])
        step = torch.exp2(exponents[:, column].double() - 1 - 3)
        # 17/16 is rounded to even, down to 1.
        quantized[:, column] += step * activated[:, column].sign()
        return quantized


def test_a_value_between_two_numbers_may_become_either_and_others_may_not() -> None:
    layer, tokens = on_a_boundary()
    flipped = output(layer, tokens, OneFlip(*vars(MXFP8).values()))
    of = bounds(layer, tokens)
    assert (flipped != of.y).any(dim=1).all()
    on, off = (
        compare(flipped[i : i + 1], Bounds(*(getattr(of, n)[i : i + 1] for n in vars(of))))
        for i in range(2)
    )
    assert on.is_right, on
    assert not off.is_right, off


# ---- sums


def hopper_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Row by row the sum of x * w as SM90's tensor cores make it, 32 products at a time (what an
    H200 was seen to do: docs/emulator.md)."""

    def exponent(values: torch.Tensor) -> torch.Tensor:
        return (torch.frexp(values)[1] - 1).double().where(values != 0, -1e4)

    total = torch.zeros(x.shape[0], dtype=torch.float64)
    exponents = (exponent(x) + exponent(w)).clamp(min=-1e4)
    for start in range(0, x.shape[1], 32):
        group = slice(start, start + 32)
        largest = torch.maximum(exponents[:, group].amax(dim=1), exponent(total))
        unit = torch.exp2(largest - 13).unsqueeze(1)
        terms = torch.cat([(x * w)[:, group], total.unsqueeze(1)], dim=1)
        exact = ((terms / unit).trunc() * unit).sum(dim=1)
        own_unit = torch.exp2(exponent(exact) - 13)
        total = torch.where(exact != 0, (exact / own_unit).trunc() * own_unit, exact)
    return total


def normal(generator: torch.Generator, num: int, size: int) -> torch.Tensor:
    return torch.randn(num, size, generator=generator)


def outliers(generator: torch.Generator, num: int, size: int) -> torch.Tensor:
    values = torch.randn(num, size, generator=generator)
    values[:, ::64] *= 50
    return values


def one_sign(generator: torch.Generator, num: int, size: int) -> torch.Tensor:
    return torch.randn(num, size, generator=generator).abs()


def two_halves(generator: torch.Generator, num: int, size: int) -> torch.Tensor:
    values = one_sign(generator, num, size)
    values[:, size // 2 :] *= -1
    return values


@pytest.mark.parametrize("size", [128, 1024, 4096])
@pytest.mark.parametrize(
    ("make_x", "make_w"),
    [(normal, normal), (outliers, normal), (one_sign, one_sign), (one_sign, two_halves)],
)
def test_short_sums_are_no_further_off_than_said(
    make_x: Callable[..., torch.Tensor], make_w: Callable[..., torch.Tensor], size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    x, _ = quantize_e4m3_groups(make_x(generator, 60, size).unsqueeze(1))
    x = x.float().double().squeeze(1)
    w = dequantize_e2m1_ue8m0(*quantize_e2m1_ue8m0(make_w(generator, 60, size)), torch.float64)
    sums, errors = sums_with_errors(x, w, HOPPER_SUM_BITS)
    assert torch.allclose(sums, x @ w.T, rtol=1e-12)
    error = (hopper_sum(x, w) - sums.diag()).abs()
    assert (error <= errors.diag()).all()
    assert error.max() > 0.02 * errors.diag().mean()  # within reach: the bound is not idle
    _, fp32_errors = sums_with_errors(x, w, FP32_SUM_BITS)
    assert torch.allclose(fp32_errors, errors * 2.0 ** (HOPPER_SUM_BITS - 23))


# ---- wrong results are wrong


def dropped_l1_block(layer: Layer, tokens: Tokens) -> tuple[Layer, Tokens]:
    """128 values of every token."""
    x = tokens.x.clone()
    x.view(torch.uint8)[:, 256:384] = 0
    return layer, replace(tokens, x=x)


def dropped_l2_block(layer: Layer, tokens: Tokens) -> tuple[Layer, Tokens]:
    """128 columns of Linear2's weights."""
    weight = layer.l2.weight.clone()
    weight[:, :, 64:128] = 0
    return replace(layer, l2=LayerWeights(weight, layer.l2.sf)), tokens


def one_token_scale(layer: Layer, tokens: Tokens) -> tuple[Layer, Tokens]:
    """A byte by one, of 32 values of one token."""
    x_sf = tokens.x_sf.clone()
    x_sf.view(torch.uint8)[3, 5] += 1
    return layer, replace(tokens, x_sf=x_sf)


def one_l2_scale(layer: Layer, tokens: Tokens) -> tuple[Layer, Tokens]:
    """A byte by one, of 32 weights of one row of Linear2."""
    sf = layer.l2.sf.clone()
    sf.view(torch.uint8)[1, 77, 3] += 1
    return replace(layer, l2=LayerWeights(layer.l2.weight, sf)), tokens


def swapped_tokens(layer: Layer, tokens: Tokens) -> tuple[Layer, Tokens]:
    """Two tokens get each other's values, not routings."""
    order = torch.arange(tokens.num_tokens)
    order[[4, 9]] = order[[9, 4]]
    return layer, replace(tokens, x=tokens.x[order], x_sf=tokens.x_sf[order])


def missing_slot(layer: Layer, tokens: Tokens) -> tuple[Layer, Tokens]:
    topk_idx = tokens.topk_idx.clone()
    topk_idx[11, 1] = -1
    return layer, replace(tokens, topk_idx=topk_idx)


def wrong_routing_weight(layer: Layer, tokens: Tokens) -> tuple[Layer, Tokens]:
    """The weights of a token's slots in each other's place."""
    weights = tokens.topk_weights.clone()
    weights[6] = weights[6].flip(0)
    return layer, replace(tokens, topk_weights=weights)


Plant = Callable[[Layer, Tokens], tuple[Layer, Tokens]]


def judged(plant: Plant, arch: str, sum_bits: int) -> Comparison:
    layer, tokens = random_layer(SHAPE, seed=2), random_tokens(SHAPE, 24, seed=2)
    wrong = output(*plant(layer, tokens), numerics_of(arch))
    return compare(wrong, bounds(layer, tokens, numerics_of(arch), sum_bits))


@pytest.mark.parametrize(("arch", "sum_bits"), KINDS)
@pytest.mark.parametrize(
    ("plant", "num_tokens"),
    [
        (dropped_l1_block, 24),
        (dropped_l2_block, 24),
        (one_token_scale, 1),
        (swapped_tokens, 2),
        (missing_slot, 1),
        (wrong_routing_weight, 1),
    ],
)
def test_an_error_makes_its_tokens_wrong_and_no_others(
    plant: Plant, num_tokens: int, arch: str, sum_bits: int
) -> None:
    assert judged(plant, arch, sum_bits).num_wrong_tokens == num_tokens


@pytest.mark.parametrize(("arch", "sum_bits"), KINDS)
def test_a_wrong_scale_of_a_few_weights_is_seen(arch: str, sum_bits: int) -> None:
    comparison = judged(one_l2_scale, arch, sum_bits)
    assert not comparison.is_right, comparison
    # One column is off, in tokens of one expert.
    assert comparison.num_values - comparison.num_equal <= 24


@pytest.mark.parametrize(("arch", "sum_bits"), KINDS)
@pytest.mark.parametrize(
    ("planted", "right"), [(None, CLAMP), (CLAMP, None), (CLAMP, 1.125 * CLAMP)]
)
def test_another_clamp_is_seen(
    planted: float | None, right: float | None, arch: str, sum_bits: int
) -> None:
    layer, tokens = random_layer(SHAPE, seed=3), random_tokens(SHAPE, 24, seed=3)
    numerics = numerics_of(arch)
    of = bounds(layer, tokens, numerics, sum_bits, right)
    assert compare(output(layer, tokens, numerics, right), of).is_right
    assert not compare(output(layer, tokens, numerics, planted), of).is_right


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_one_value_of_linear1_that_is_off_by_one_number_is_seen(arch: str) -> None:
    """Where sums are FP32: that is less than 1 % of a token."""

    class NextNumber(Numerics):
        def requantize(self, activated: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            quantized = super().requantize(activated, weights)
            largest = activated.abs().argmax(dim=1, keepdim=True)
            return quantized.scatter(1, largest, quantized.gather(1, largest) * 0.875)

    layer, tokens = random_layer(SHAPE, seed=4), random_tokens(SHAPE, 24, seed=4)
    wrong = output(layer, tokens, NextNumber(*vars(numerics_of(arch)).values()))
    comparison = compare(wrong, bounds(layer, tokens, numerics_of(arch)))
    assert comparison.num_wrong_tokens == 24, comparison


def test_a_sum_of_domains_may_be_what_any_partial_sums_within_their_bounds_give() -> None:
    """1, 1 and -256 at the ends of what they may be: the interval is met at both ends, and one
    BF16 unit further is outside."""

    def part(low: float, middle: float, high: float) -> Bounds:
        ends = [torch.full((1, 4), end) for end in (low, high)]
        return Bounds(torch.full((1, 4), middle).bfloat16(), *ends, torch.ones(1).double())

    together = sum_of_domains([part(1, 1, 1), part(0.5, 1, 1.5), part(-258, -256, -254)])
    assert together.y.flatten().tolist() == [-254.0] * 4
    assert together.low.flatten().tolist() == [-256.0] * 4  # 1 + 0.5 - 258 is -256.5
    assert together.high.flatten().tolist() == [-252.0] * 4  # 1 + 1.5 - 254 is -251.5, a tie
    # The parts' errors are at right angles; the roundings of a result of four values of 254 add
    # 2^-8 of each, twice.
    rounding = 2 * 4 * (254 / 256) ** 2
    assert float(together.max_token_error) == pytest.approx((3 + rounding) ** 0.5)
    for value, is_right in ((-256.0, True), (-252.0, True), (-258.0, False), (-251.0, False)):
        y = torch.tensor([[value, -254.0, -254.0, -254.0]]).bfloat16()
        assert (compare(y, together).num_wrong == 0) == is_right
