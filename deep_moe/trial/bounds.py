"""Which outputs are right: for every value the interval that rounding explains.

The kernel adds products in an order of its own and approximates the SiLU, so a number that lies
near the middle between two BF16 or E4M3 numbers may go to either. Here each step of the reference
is done with both ends of what the kernel may have:

1. A sum of products is off by no more than `sum_errors` says; a bias is added with one rounding
   more, and so is a routing weight behind one. Its two ends are rounded to BF16: mostly to one
   number.
2. The activation of both ends, a little further apart by what its approximations may be off.
3. Both ends are rounded to E4M3 or E2M1. Where they differ, the value is a candidate: it may be
   either. Where the block's largest value is near the end of what a scale holds, the scale is open,
   too.
4. In Linear2 a candidate moves an output by its step times the weight. All of them together move
   it by no more than the sum of these moves, and by no more than 5 times the root of the sum of
   their squares, since it is by chance to which side a candidate goes. With the error of the sum
   that is an interval, whose ends are rounded to BF16.
5. Combine rounds monotonically: the sum of the low ends and the sum of the high ends, in slot order
   and rounded as there, bound the output. Where many slots have many candidates, again the root of
   the sum of all squares does.

A value outside of its interval is wrong. Where candidates are many, intervals are wide, but they
cannot all be used up: a token's error as a vector is bounded by the squares, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deep_moe.activations import (
    DEFAULT_ACTIVATION,
    Activation,
    GatedActivation,
    activation_of,
)
from deep_moe.formats.block_scaled import (
    GROUP_SIZE,
    quantize_e4m3_groups,
    ue8m0_to_float,
)
from deep_moe.formats.numerics import Numerics, ScaledOutput
from deep_moe.weights.layers import LayerTensors, Pair, one_expert

from .reference import (
    biases_of_expert,
    combine_slots,
    round_to_bf16,
    valid_slots,
    with_shared_slots,
)

# Standard deviations. A sum of independent errors, each within +-d, exceeds 5 times the root of the
# sum of d^2 once in 270,000 at the worst, where each is d; candidates mostly go where the reference
# has them.
_FLIP_DEVIATIONS = 5.0
_SUM_DEVIATIONS = 6.0
_MAX_SQUARED_TOKEN_ERROR = 2.0  # times what all candidates on the other side, at right angles, make
_FP32_FRACTION_BITS = 23
_HALF_BF16_UNIT = 2.0**-8  # of a number, at most
_E4M3_SMALLEST_NORMAL = 2.0**-6
_E4M3_SMALLEST = 2.0**-9
_FP32_HALF_UNIT = 2.0**-24
# Of a sigmoid's argument: from here on rcp.approx.ftz may find a subnormal number, which it makes
# zero.
_SIGMOID_FLUSHED_BELOW = -86.0
_SMALLEST_NORMAL_FP32 = 2.0**-126
_MAX_OPEN_SCALES = 4  # that are tried one by one
_MAX_PARTIAL_SUMS = 1 << 24  # held at a time


@dataclass(frozen=True)
class Bounds:
    """Of right outputs. All are [tokens, hidden] but the last."""

    y: torch.Tensor  # bfloat16: the reference's
    low: torch.Tensor  # float32
    high: torch.Tensor  # float32
    max_token_error: torch.Tensor  # float64 [tokens]: length of y's error as a vector


class Interval(NamedTuple):
    """Ends of what values may be."""

    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True)
class SlotBounds:
    """Of what slots add to their tokens, [slots, hidden]."""

    # bfloat16, or float32 where combine multiplies by the routing weights.
    y: torch.Tensor  # the reference's
    low: torch.Tensor
    high: torch.Tensor
    unrounded: torch.Tensor  # float64: y before it was rounded
    squares: torch.Tensor  # float64: of the moves of all candidates, added up
    sum_errors: torch.Tensor  # float64: of Linear2's sums


def reference_bounds(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    l1_weights: LayerTensors,
    l2_weights: LayerTensors,
    *,
    numerics: Numerics,
    sum_bits: int,
    activation: str | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
    num_shared_experts: int = 0,
    y: torch.Tensor | None = None,
    weights_in_combine: bool = False,
) -> Bounds:
    """Bounds of the output [tokens, hidden] for inputs as `reference_mega_moe` takes them.

    sum_bits: what sums of products keep where the kernel ran: `numerics.sum_bits` on a GPU,
    `FP32_SUM_BITS` in the emulator, unless it was asked for Hopper's sums. weights_in_combine: of
    the split path, whose experts' rows are rounded to BF16 without their routing weights; combine
    multiplies by these in FP32.
    """
    applied = activation_of(activation, activation_clamp)
    num_experts = l1_weights[0].shape[0]
    topk_idx, topk_weights = with_shared_slots(
        topk_idx, topk_weights, num_experts, num_shared_experts
    )

    def of_expert(expert_idx: int, token_idx: torch.Tensor, weights: torch.Tensor) -> SlotBounds:
        slots = expert_bounds(
            numerics.tokens(x[token_idx], x_sf[token_idx]),
            torch.ones_like(weights) if weights_in_combine else weights,
            one_expert(l1_weights, expert_idx),
            one_expert(l2_weights, expert_idx),
            numerics=numerics,
            sum_bits=sum_bits,
            activation=applied,
            biases=biases_of_expert(l1_bias, l2_bias, expert_idx),
        )
        return _weighted(slots, weights) if weights_in_combine else slots

    return combined_bounds(
        topk_idx, topk_weights, num_experts, l2_weights[0].shape[1], of_expert, y
    )


def combined_bounds(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    hidden: int,
    of_expert: Callable[[int, torch.Tensor, torch.Tensor], SlotBounds],
    base: torch.Tensor | None = None,
) -> Bounds:
    """Bounds of outputs from those of their slots: of_expert(expert, tokens [n], routing weights
    [n]) is asked for each expert that is named, once. base: what the slots are added to, exact."""
    num_tokens, num_topk = topk_idx.shape
    device = topk_idx.device
    ends = torch.zeros((3, num_tokens, num_topk, hidden), dtype=torch.float32, device=device)
    sums = torch.zeros((3, num_tokens, hidden), dtype=torch.float64, device=device)
    center, squares, slack = sums
    rounding_squares = torch.zeros_like(center)
    if base is not None:
        center += base
    valid = valid_slots(topk_idx, num_experts)
    for expert_idx in topk_idx[valid].unique().tolist():
        token_idx, slot_idx = (topk_idx == expert_idx).nonzero(as_tuple=True)
        slots = of_expert(expert_idx, token_idx, topk_weights[token_idx, slot_idx])
        for which, values in enumerate((slots.y, slots.low, slots.high)):
            ends[which, token_idx, slot_idx] = values.float()
        reach = _FLIP_DEVIATIONS * slots.squares.sqrt() + slots.sum_errors
        rounding = _HALF_BF16_UNIT * (slots.unrounded.abs() + reach)
        center.index_add_(0, token_idx, slots.unrounded)
        squares.index_add_(0, token_idx, slots.squares)
        slack.index_add_(0, token_idx, slots.sum_errors + rounding)
        rounding_squares.index_add_(
            0, token_idx, slots.sum_errors**2 + (_HALF_BF16_UNIT * slots.unrounded) ** 2
        )
    y, low, high = (combine_slots(end, valid, base) for end in ends)
    reach = _FLIP_DEVIATIONS * squares.sqrt() + slack
    reach += _HALF_BF16_UNIT * (center.abs() + reach)
    rounding_squares += (_HALF_BF16_UNIT * center) ** 2
    return Bounds(
        y,
        torch.maximum(low.float(), (center - reach).float()),
        torch.minimum(high.float(), (center + reach).float()),
        (_MAX_SQUARED_TOKEN_ERROR * (squares + rounding_squares).sum(dim=1)).sqrt(),
    )


def sum_of_domains(parts: Sequence[Bounds]) -> Bounds:
    """Bounds of the outputs of a layer over several domains: the BF16 partial sum of each, which is
    within its bounds, added in this order in FP32 and rounded once.

    Errors of the parts are as independent as those of slots, and so are both roundings at the end.
    """

    def added(ends: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(ends[0], dtype=torch.float32)
        for end in ends:
            total = total + end.float()
        return total.to(torch.bfloat16)

    y = added([part.y for part in parts])
    squares = sum((part.max_token_error**2 for part in parts), torch.zeros(()).double())
    rounding = (_HALF_BF16_UNIT * y.double()).square().sum(dim=1)
    return Bounds(
        y,
        added([part.low for part in parts]).float(),
        added([part.high for part in parts]).float(),
        (squares + _MAX_SQUARED_TOKEN_ERROR * rounding).sqrt(),
    )


def expert_bounds(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    l1_weights: LayerTensors,
    l2_weights: LayerTensors,
    *,
    numerics: Numerics,
    sum_bits: int,
    activation: Activation,
    biases: Pair | None = None,
) -> SlotBounds:
    """Of one expert on float64 tokens [n, H] with routing weights [n]. biases: as the reference
    takes them."""
    dense = numerics.weights(l1_weights, activation.num_l1_matrices)
    sums, errors = _sums_of(tokens, dense, sum_bits, numerics)
    outer_weights = None
    if biases is not None:
        sums, errors = _with_bias(sums, errors, biases[0])
    if biases is not None or numerics.weighs_results:
        outer_weights, weights = weights, torch.ones_like(weights)
    activated = activation.of_linear1(round_to_bf16(sums).float()) * weights.unsqueeze(1)
    quantized = numerics.requantize(activated, weights)

    rows = Interval(*(round_to_bf16(end).double() for end in (sums - errors, sums + errors)))
    ends = _quantized_ends(activated_ends(rows, weights, activation), weights, numerics)
    dense = numerics.weights(l2_weights, 1)
    sums, errors = _sums_of(quantized, dense, sum_bits, numerics)
    down, up_moves, squares = _moves(quantized, ends, dense)
    y = sums
    if outer_weights is not None:
        factor = outer_weights.double().unsqueeze(1)
        if biases is not None:
            y = sums + biases[1]
            sums, errors = _with_bias(sums, errors, biases[1])
        y = y.float() * outer_weights.float().unsqueeze(1)
        # The product is rounded once more.
        sums, errors = sums * factor, errors * factor.abs() * (1 + _FP32_HALF_UNIT)
        errors += _FP32_HALF_UNIT * sums.abs()
        ends_of_moves = torch.stack((down * factor, up_moves * factor))
        down, up_moves = ends_of_moves.amin(dim=0), ends_of_moves.amax(dim=0)
        squares = squares * factor**2
    return SlotBounds(
        round_to_bf16(y),
        round_to_bf16(sums + down - errors),
        round_to_bf16(sums + up_moves + errors),
        sums,
        squares,
        errors,
    )


def _weighted(slots: SlotBounds, weights: torch.Tensor) -> SlotBounds:
    """Of slots whose rows combine multiplies by their routing weights [slots]."""
    factor = weights.float().unsqueeze(1)
    y, low, high = (end.float() * factor for end in (slots.y, slots.low, slots.high))
    exact = factor.double()
    unrounded = slots.unrounded * exact
    return SlotBounds(
        y,
        torch.minimum(low, high),
        torch.maximum(low, high),
        unrounded,
        slots.squares * exact**2,
        slots.sum_errors * exact.abs() + _FP32_HALF_UNIT * unrounded.abs(),
    )


def _with_bias(
    sums: torch.Tensor, errors: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums float64 [n, R] and how far off they may be, when a bias [R] has been added in FP32."""
    sums = sums + bias
    return sums, errors + _FP32_HALF_UNIT * (sums.abs() + errors)


def _sums_of(
    values: torch.Tensor, weights: torch.Tensor, sum_bits: int, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sums_with_errors`, and the rounding of their product with a factor of the row."""
    sums, errors = sums_with_errors(
        values,
        weights,
        sum_bits,
        numerics.sum_block,
        numerics.sum_products,
        numerics.multiplies_block_scales,
    )
    if numerics.rounds_row_factors:
        errors = errors + _FP32_HALF_UNIT * (sums.abs() + errors)
    return sums, errors


def sums_with_errors(
    values: torch.Tensor,
    weights: torch.Tensor,
    sum_bits: int,
    sum_block: int | None = None,
    num_products: int = GROUP_SIZE,
    multiplies_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """values @ weights.T of float64 [n, K] and [R, K], and how far off the tensor core's sum may
    be: both float64 [n, R]. sum_block: of so many values along K the tensor core has the sum, and
    sums are added up in FP32; None: of all. num_products: that one instruction adds.
    multiplies_scales: whether each of those sums is multiplied by a product of two scales.

    Of FP8, one instruction adds 32 products to the sum so far. All terms are cut, towards zero,
    below a unit that is 2^-sum_bits of the largest of them, and so is the result. With u the unit
    of a step, from the partial sums before and behind it and the largest product:
    - on the average a cut takes half a unit off a term's magnitude: u/2 times the excess of
      positive over negative products, added up with its sign over all steps;
    - around that cuts scatter by up to u/sqrt(12) for each of 34 terms: 1.7 times the root of the
      sum of u^2, were all of them inexact. Most are not: FP8 products have few bits. Of BF16
      one instruction adds 16, and it is 1.3 times the root.
    Rounding to nearest, and orders other than by so many consecutive values, stay below that. Where
    sums are added up in FP32, each addition rounds by up to 2^-24 of the sum so far. A product of
    two scales rounds by up to 2^-24 of itself, and so moves what it multiplies.
    """
    group = sum_block or num_products
    if values.shape[1] % group:  # the kernel's are padded, too
        missing = (0, -values.shape[1] % group)
        values, weights = (torch.nn.functional.pad(each, missing) for each in (values, weights))
    num_groups = values.shape[1] // num_products
    grouped_values = values.unflatten(1, (num_groups, num_products)).transpose(0, 1)
    grouped_weights = weights.unflatten(1, (num_groups, num_products)).permute(1, 2, 0)
    num_blocks = 1 if sum_block is None else values.shape[1] // sum_block
    weight_signs = grouped_weights.sign().float()
    largest_weights = grouped_weights.abs().amax(dim=1, keepdim=True)
    unit = 2.0 ** -min(sum_bits, _FP32_FRACTION_BITS)
    num_rows = max(1, _MAX_PARTIAL_SUMS // (num_groups * weights.shape[0]))
    sums, errors = [], []
    for part in grouped_values.split(num_rows, dim=1):
        by_block = torch.bmm(part, grouped_weights).unflatten(0, (num_blocks, -1))
        partial = by_block.cumsum(dim=1)
        sizes = partial.abs()
        largest_products = part.abs().amax(dim=2, keepdim=True) * largest_weights
        largest = torch.maximum(sizes, largest_products.view_as(sizes))
        torch.maximum(largest[:, 1:], sizes[:, :-1], out=largest[:, 1:])
        largest = largest.flatten(0, 1)
        totals = partial[:, -1].cumsum(dim=0)
        excess = torch.bmm(part.sign().float(), weight_signs)
        bias = (largest * excess).sum(dim=0).abs() / 2
        scatter = _SUM_DEVIATIONS * largest.square().sum(dim=0).sqrt()
        sums.append(totals[-1])
        errors.append(unit * (bias + scatter))
        if num_blocks > 1:
            rounding = _SUM_DEVIATIONS * totals.square().sum(dim=0).sqrt()
            errors[-1] += _FP32_HALF_UNIT * rounding
        if multiplies_scales:
            of_blocks = partial[:, -1].square().sum(dim=0).sqrt()
            errors[-1] += _FP32_HALF_UNIT * _SUM_DEVIATIONS * of_blocks
    return torch.cat(sums), torch.cat(errors)


def activated_ends(rows: Interval, weights: torch.Tensor, activation: Activation) -> Interval:
    """Of Linear1's output, float64 [n, 2*I] or without a gate [n, I], what activation and routing
    weight make of it, [n, I], and what the kernel may."""
    units, units_per_size = activation.error_units
    if not isinstance(activation, GatedActivation):
        corners = torch.stack(
            [activation.up_factor(end) * weights.double().unsqueeze(1) for end in rows]
        )
        error = corners.abs().amax(dim=0) * (units * _FP32_HALF_UNIT)
        return Interval(corners.amin(dim=0) - error, corners.amax(dim=0) + error)
    (gate_low, up_low), (gate_high, up_high) = (end.chunk(2, dim=1) for end in rows)
    gate, up = Interval(gate_low, gate_high), Interval(up_low, up_high)
    at_ends = [activation.gate_factor(end) for end in gate]
    where = gate.low.new_full((1,), activation.lowest_gate)
    holds_lowest = (gate.low < where) & (gate.high > where)
    low = torch.minimum(*at_ends)
    low = activation.gate_factor(where).where(holds_lowest, low)
    high = torch.maximum(*at_ends)
    factors = [activation.up_factor(end) * weights.double().unsqueeze(1) for end in up]
    corners = torch.stack([end * factor for end in (low, high) for factor in factors])
    below_zero = (-activation.sigmoid_argument(gate.low)).clamp(min=0)
    largest = corners.abs().amax(dim=0)
    error = largest * ((units + units_per_size * below_zero) * _FP32_HALF_UNIT)
    largest_factor = torch.maximum(*(factor.abs() for factor in factors))
    flushed = gate.low.abs() * largest_factor * _SMALLEST_NORMAL_FP32
    error += flushed.where(below_zero > -_SIGMOID_FLUSHED_BELOW, 0.0)
    return Interval(corners.amin(dim=0) - error, corners.amax(dim=0) + error)


def _quantized_ends(ends: Interval, weights: torch.Tensor, numerics: Numerics) -> Interval:
    """Through E4M3, E2M1 or BF16: float64 [n, I]."""
    if numerics.scale_block is None or numerics.scale_bytes is None:
        return Interval(round_to_bf16(ends.low).double(), round_to_bf16(ends.high).double())
    low, high = (numerics.blocks(end.float(), numerics.scale_block) for end in ends)
    sizes = torch.maximum(low.abs(), high.abs())
    least = torch.minimum(low.abs(), high.abs()).masked_fill((low <= 0) & (high >= 0), 0.0)
    candidates = [numerics.scale_bytes(s.amax(dim=2), weights).int() for s in (least, sizes)]
    if not numerics.output.has_powers:
        blocks = _ends_of_any_scales(
            Interval(low, high), candidates[0], candidates[1], numerics.output
        )
        return Interval(*(end.flatten(1)[:, : ends.low.shape[1]] for end in blocks))
    scale_bytes = torch.maximum(*candidates)
    is_open = (candidates[0] != candidates[1]).unsqueeze(2)
    scales = ue8m0_to_float(scale_bytes).unsqueeze(2)
    rounded = []
    for end, outwards in ((low, torch.floor), (high, torch.ceil)):
        codes, _ = quantize_e4m3_groups(end, scale_bytes=scale_bytes)
        values = codes.float().double()
        # With a smaller scale it is the same numbers, but those that are subnormal with this one.
        exact = end.double() / scales
        finer = outwards(exact / _E4M3_SMALLEST) * _E4M3_SMALLEST
        values = finer.where(is_open & (exact.abs() < _E4M3_SMALLEST_NORMAL), values)
        rounded.append((values * scales).flatten(1)[:, : ends.low.shape[1]])
    return Interval(*rounded)


def _ends_of_any_scales(
    ends: Interval, lowest: torch.Tensor, highest: torch.Tensor, output: ScaledOutput
) -> Interval:
    """Blocks [n, blocks, values] with any of the scales between two bytes [n, blocks], float64.
    Where these are far apart, the block may be zero, and any value off by as much as the largest is
    by rounding: by less than a quarter of the largest of all."""
    low, high = ends
    most = torch.full_like(low, torch.inf, dtype=torch.float64)
    rounded_low, rounded_high = most, -most
    for step in range(min(int((highest - lowest).max()), _MAX_OPEN_SCALES - 1) + 1):
        scale_bytes = torch.minimum(lowest + step, highest).to(torch.uint8)
        scales = output.scales(scale_bytes).unsqueeze(2)
        rounded_low = torch.minimum(rounded_low, output.values(low, scale_bytes) * scales)
        rounded_high = torch.maximum(rounded_high, output.values(high, scale_bytes) * scales)
    largest = torch.maximum(low.abs(), high.abs()).amax(dim=2, keepdim=True).double()
    is_far = (highest - lowest >= _MAX_OPEN_SCALES).unsqueeze(2)
    return Interval(
        (low - largest / 4).where(is_far, rounded_low),
        (high + largest / 4).where(is_far, rounded_high),
    )


def _moves(
    quantized: torch.Tensor, ends: Interval, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far candidates may move the products of `quantized` [n, I] and `weights` [H, I], down (as
    negative numbers) and up, and the sum of the squares of all moves: float64 [n, H]."""
    moves = quantized.new_zeros((3, quantized.shape[0], weights.shape[0]))
    below, above = quantized - ends.low, ends.high - quantized
    rows = ((below > 0) | (above > 0)).any(dim=1).nonzero().squeeze(1)
    if rows.numel() == 0:
        return moves[0], moves[1], moves[2]
    below, above = below[rows].clamp(min=0), above[rows].clamp(min=0)
    middle = (above - below) / 2 @ weights.T
    reach = (above + below) / 2 @ weights.abs().T
    squares = torch.maximum(below, above) ** 2 @ (weights**2).T
    likely = _FLIP_DEVIATIONS * squares.sqrt()
    moves[0, rows] = torch.maximum(middle - reach, -likely).clamp(max=0)
    moves[1, rows] = torch.minimum(middle + reach, likely).clamp(min=0)
    moves[2, rows] = squares
    return moves[0], moves[1], moves[2]
