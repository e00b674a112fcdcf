"""Which results of the differentiable layer are right: output and gradients in float64, and how far
from them rounding can lead.

The formulas are repeated here, slot by slot and without rows, in float64. Each value has a radius:
how far the layer's own roundings can have moved it, each at its worst and all to the same side.
These are the roundings to BF16 after each product and each step, to E4M3 where the precision has
it, and to FP32 within sums. A radius goes through a product by the magnitudes of the other operand.
Through an activation it goes as an interval, in which the function is evaluated at nine places; so
a value that may have fallen to the other side of a clamp has both slopes.

A result further away than its radius is wrong. Zero gradients, of unused slots and of experts
without tokens, have a radius of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from deep_moe.activations import GatedActivation
from deep_moe.formats.block_scaled import GROUP_SIZE, quantize_e4m3_groups, ue8m0_to_float
from deep_moe.formats.float_scaled import GROUP_SIZE as FP8_GROUP
from deep_moe.formats.float_scaled import MIN_AMAX, quantize_e4m3_float
from deep_moe.training.experts import FP8_DATA_GRADIENTS, FP8_PRECISIONS, Precision

_HALF_BF16_UNIT = 2.0**-8  # of a number, at most
_SMALLEST_BF16 = 2.0**-134  # half of it
_HALF_FP32_UNIT = 2.0**-24
_HALF_E4M3_UNIT = 2.0**-4
_E4M3_MAX, _HALF_E4M3_SMALLEST = 448.0, 2.0**-10
# Slopes are sums of terms up to 1 + |gate| in FP32, of exponentials good to a few units.
_SLOPE_ERROR = 2.0**-19
_NUM_PLACES = 9


@dataclass(frozen=True)
class Ball:
    """Values that a tensor may have: center +- radius, float64 of one shape."""

    center: torch.Tensor
    radius: torch.Tensor

    @classmethod
    def exact(cls, values: torch.Tensor) -> Ball:
        center = values.detach().double()
        return cls(center, torch.zeros_like(center))

    @property
    def most(self) -> torch.Tensor:
        """The largest magnitude."""
        return self.center.abs() + self.radius

    def wider(self, by: torch.Tensor) -> Ball:
        return Ball(self.center, self.radius + by)

    def rounded(self) -> Ball:
        """To BF16. Zero stays zero."""
        return self.wider(self.most * _HALF_BF16_UNIT + (self.most > 0) * _SMALLEST_BF16)

    def __add__(self, other: Ball) -> Ball:
        """In FP32."""
        total = Ball(self.center + other.center, self.radius + other.radius)
        return total.wider(total.most * _HALF_FP32_UNIT)

    def __mul__(self, other: Ball) -> Ball:
        """In FP32."""
        radius = self.most * other.radius + other.center.abs() * self.radius
        product = Ball(self.center * other.center, radius)
        return product.wider(product.most * _HALF_FP32_UNIT)

    def __matmul__(self, other: Ball) -> Ball:
        """Sums in FP32, in any order."""
        num_terms = self.center.shape[1]
        most = self.most @ other.most
        radius = self.most @ other.radius + self.radius @ other.center.abs()
        radius = radius + (num_terms + 2) * _HALF_FP32_UNIT * most
        return Ball(self.center @ other.center, radius)

    @property
    def t(self) -> Ball:
        return Ball(self.center.t(), self.radius.t())

    def error_of(self, values: torch.Tensor) -> torch.Tensor:
        """In radii; where the radius is zero, infinite unless the value is the center."""
        error = (values.double() - self.center).abs()
        return torch.where(error == 0, 0.0, error / self.radius)


@dataclass(frozen=True)
class Formula:
    """What a call computes. precision, quantize_kept: as of `deep_moe.moe`. rounds_rows: rows
    between ranks are rounded once more."""

    activation: GatedActivation
    precision: Precision
    quantize_kept: bool
    rounds_rows: bool


def bounds_of_layer(
    tensors: Mapping[str, torch.Tensor | None],
    topk_idx: torch.Tensor,
    d_out: torch.Tensor,
    formula: Formula,
) -> dict[str, Ball]:
    """The output ("out") and the gradient of each tensor. tensors: x, topk_weights, w1, w3 or None,
    w2, and maybe b1, b3, b2, as `deep_moe.moe` takes them; d_out: bfloat16 [tokens, hidden]."""
    given = {name: Ball.exact(t) for name, t in tensors.items() if t is not None}
    x, topk_weights, w2 = (given[name] for name in ("x", "topk_weights", "w2"))
    found = {
        name: Ball.exact(torch.zeros_like(ball.center))
        for name, ball in {"out": x, **given}.items()
    }
    num_experts, intermediate, _ = w2.center.shape
    num_topk = topk_idx.shape[1]
    for expert in range(num_experts):
        slots = (topk_idx.reshape(-1) == expert).nonzero().squeeze(1)
        if not len(slots):
            continue
        weights = _Expert.of(given, expert, intermediate)
        token = slots // num_topk
        of_slots = _slots_of(
            weights,
            _at(x, token),
            _at(Ball.exact(d_out), token),
            Ball(topk_weights.center.view(-1)[slots], topk_weights.radius.view(-1)[slots]),
            formula,
            has_two_tensors=tensors["w3"] is not None,
        )
        for name, rows in (("out", of_slots.pop("out")), ("x", of_slots.pop("x"))):
            for value, place in (
                (found[name].center, rows.center),
                (found[name].radius, rows.radius + num_topk * _HALF_FP32_UNIT * rows.most),
            ):
                value.index_add_(0, token, place)
        of_weights = of_slots.pop("topk_weights")
        found["topk_weights"].center.view(-1)[slots] = of_weights.center
        found["topk_weights"].radius.view(-1)[slots] = of_weights.radius
        if tensors["w3"] is None:
            gate, up = of_slots.pop("w1"), of_slots.pop("w3")
            of_slots["w1"] = Ball(
                torch.cat([gate.center, up.center], 1), torch.cat([gate.radius, up.radius], 1)
            )
        for name, ball in of_slots.items():
            if name in found:
                found[name].center[expert] = ball.center
                found[name].radius[expert] = ball.radius
    for name in ("out", "x"):
        found[name] = found[name].rounded()
    for name in ("b1", "b3", "b2"):
        bias = tensors.get(name)
        if bias is not None and bias.dtype == torch.bfloat16:
            found[name] = found[name].rounded()
    return found


@dataclass(frozen=True)
class _Expert:
    """Of one expert; biases zero if there are none."""

    gate: Ball  # [hidden, intermediate]
    up: Ball
    down: Ball  # [intermediate, hidden]
    gate_bias: Ball  # [intermediate]
    up_bias: Ball
    down_bias: Ball  # [hidden]

    @classmethod
    def of(cls, given: Mapping[str, Ball], expert: int, intermediate: int) -> _Expert:
        idx = torch.tensor(expert)
        w1, w2 = _at(given["w1"], idx), _at(given["w2"], idx)
        if "w3" in given:
            gate, up = w1, _at(given["w3"], idx)
        else:
            gate = Ball.exact(w1.center[:, :intermediate])
            up = Ball.exact(w1.center[:, intermediate:])
        if "b1" in given:
            biases = [_at(given[name], idx) for name in ("b1", "b3", "b2")]
        else:
            biases = [Ball.exact(w2.center.new_zeros(n)) for n in (intermediate,) * 2]
            biases.append(Ball.exact(w2.center.new_zeros(w2.center.shape[1])))
        return cls(gate, up, w2, *biases)


def _slots_of(
    expert: _Expert, x: Ball, d_out: Ball, weight: Ball, formula: Formula, *, has_two_tensors: bool
) -> dict[str, Ball]:
    """Of an expert's slots: rows of the output and of x's gradient, and the gradients of weights
    that they make. x, d_out: [slots, hidden]; weight: [slots]."""
    gate_weights, up_weights, down_weights, inputs = expert.gate, expert.up, expert.down, x
    if formula.precision == "mxfp8":
        inputs = Ball.exact(_mxfp8(x.center))
        gate_weights, up_weights, down_weights = (
            Ball.exact(_mxfp8(w.center.t()).t()) for w in (expert.gate, expert.up, expert.down)
        )
    elif formula.precision in FP8_PRECISIONS:
        inputs = Ball.exact(_fp8(x.center))
        gate_weights, up_weights, down_weights = (
            Ball.exact(_fp8_weights(w.center)) for w in (expert.gate, expert.up, expert.down)
        )
    column = Ball(weight.center.unsqueeze(1), weight.radius.unsqueeze(1))
    linear1 = [(inputs @ weights).rounded() for weights in (gate_weights, up_weights)]
    gate, up = linear1[0] + expert.gate_bias, linear1[1] + expert.up_bias
    activation = formula.activation
    gate_factor, up_factor = _factors(activation, gate, up)
    factor = (gate_factor * up_factor).rounded()
    if formula.precision == "mxfp8":
        factor = _rounded_to_e4m3(factor)
    elif formula.precision in FP8_PRECISIONS:
        factor = _rounded_to_fp8(factor)
    row = (factor @ down_weights).rounded() + expert.down_bias
    has_bias = bool((expert.down_bias.center != 0).any())
    if formula.rounds_rows and has_bias:
        row = row.rounded()

    if formula.quantize_kept:
        kept_gate, kept_up = map(_rounded_to_fp8, linear1)
        gate, up = kept_gate.rounded() + expert.gate_bias, kept_up.rounded() + expert.up_bias
        gate_factor, up_factor = _factors(activation, gate, up)
    gate_slope = _through(activation.gate_slope, gate).wider(_SLOPE_ERROR * (1 + gate.most))
    up_slope = _through(activation.up_slope, up).wider(_SLOPE_ERROR * (1 + up.most))
    activated = gate_factor * up_factor
    quantizes_data_gradients = formula.precision in FP8_DATA_GRADIENTS
    if quantizes_data_gradients:
        d_activated = (Ball.exact(_fp8(d_out.center)) @ down_weights.t).rounded()
    else:
        d_activated = (d_out @ expert.down.t).rounded()
    d_weighted = d_activated * column
    d_gate = (d_weighted * gate_slope * up_factor).rounded()
    d_up = (d_weighted * up_slope * gate_factor).rounded()
    if quantizes_data_gradients:
        of_gate = _rounded_to_fp8(d_gate) @ gate_weights.t
        of_up = _rounded_to_fp8(d_up) @ up_weights.t
    else:
        of_gate, of_up = d_gate @ expert.gate.t, d_up @ expert.up.t
    if has_two_tensors:
        d_row = of_gate.rounded() + of_up.rounded()
        if formula.rounds_rows:
            d_row = d_row.rounded()
    else:
        d_row = (of_gate + of_up).rounded()
    d_weight = _sum(activated * d_activated, 1) + _sum(d_out * expert.down_bias, 1)
    d_down_bias = _sum(d_out * column, 0)
    # A weight is three BF16 numbers, each a product of its own; the second is 2^-8 of the first.
    most = (d_out.most * column.most).sum(0)
    d_down_bias = d_down_bias.rounded().wider(_HALF_BF16_UNIT * 2.0**-7 * most)
    weighted = (activated * column).rounded()
    factors = [(x, d_gate), (x, d_up), (weighted, d_out)]
    if formula.precision == "fp8_wgrad":
        factors = [(_rounded_in_blocks(a), _rounded_in_blocks(b)) for a, b in factors]
    d_w1, d_w3, d_w2 = ((a.t @ b).rounded() for a, b in factors)
    return {
        "out": column * row,
        "x": d_row,
        "topk_weights": d_weight,
        "w1": d_w1,
        "w3": d_w3,
        "w2": d_w2,
        "b1": _sum(d_gate, 0).rounded(),
        "b3": _sum(d_up, 0).rounded(),
        "b2": d_down_bias,
    }


def _factors(activation: GatedActivation, gate: Ball, up: Ball) -> tuple[Ball, Ball]:
    """Whose product is the activation's output."""
    units, units_below_zero = activation.error_units
    below_zero = (-activation.sigmoid_argument(gate.center - gate.radius)).clamp(min=0)
    gate_factor = _through(activation.gate_factor, gate)
    off = (units + units_below_zero * below_zero) * _HALF_FP32_UNIT
    gate_factor = gate_factor.wider(gate_factor.most * off)
    up_factor = _through(activation.up_factor, up)
    return gate_factor, up_factor.wider(up_factor.most * units * _HALF_FP32_UNIT)


def _at(ball: Ball, idx: torch.Tensor) -> Ball:
    return Ball(ball.center[idx], ball.radius[idx])


def _sum(ball: Ball, dim: int) -> Ball:
    """In FP32, in any order."""
    error = ball.center.shape[dim] * _HALF_FP32_UNIT * ball.most.sum(dim)
    return Ball(ball.center.sum(dim), ball.radius.sum(dim) + error)


def _through(function: Callable[[torch.Tensor], torch.Tensor], ball: Ball) -> Ball:
    """Between two of the places a function bends by no more than its second derivative, up to 4
    here, lets it: spacing^2 / 8 of that. Where it jumps between two, as slopes of limits do, it
    goes on to the jump from either, by no more than its first derivative, up to 4, lets it."""
    places = torch.linspace(-1, 1, _NUM_PLACES, dtype=torch.float64)
    values = torch.stack([function(ball.center + place * ball.radius) for place in places])
    low, high = values.amin(0), values.amax(0)
    spacing = 2 * ball.radius / (_NUM_PLACES - 1)
    jumps = (values.diff(dim=0).abs() > 4 * spacing).any(0)
    return Ball((low + high) / 2, (high - low) / 2 + spacing.square() / 2 + 4 * spacing * jumps)


def _mxfp8(values: torch.Tensor) -> torch.Tensor:
    """[..., K] as E4M3 with a UE8M0 scale for every 32, in float64."""
    quantized, scale_bytes = quantize_e4m3_groups(values.float().unflatten(-1, (-1, GROUP_SIZE)))
    scaled = quantized.float().double() * ue8m0_to_float(scale_bytes).unsqueeze(-1)
    return scaled.flatten(-2)


def _fp8(values: torch.Tensor) -> torch.Tensor:
    """[..., K] as E4M3 with a float32 scale for every 128, in float64."""
    quantized, scales = quantize_e4m3_float(values.float())
    groups = quantized.double().unflatten(-1, (-1, FP8_GROUP))
    return (groups * scales.double().unsqueeze(-1)).flatten(-2)


def _fp8_weights(weights: torch.Tensor) -> torch.Tensor:
    """[K, N], multiples of 128, as E4M3 with a float32 scale for every 128 x 128, in float64."""
    blocks = weights.unflatten(1, (-1, FP8_GROUP)).unflatten(0, (-1, FP8_GROUP)).transpose(1, 2)
    flat = blocks.float().flatten(2)
    quantized, scales = quantize_e4m3_float(flat, group_size=FP8_GROUP**2)
    rounded = quantized.double() * scales.double()
    return rounded.view(blocks.shape).transpose(1, 2).reshape(weights.shape)


def _rounded_to_fp8(ball: Ball, group: int = FP8_GROUP) -> Ball:
    """With a scale that makes the largest of so many neighbours 448, rounded like the factor."""
    groups = ball.most.unflatten(-1, (-1, group))
    largest = groups.amax(-1, keepdim=True).clamp(min=MIN_AMAX)
    smallest = (largest / _E4M3_MAX * _HALF_E4M3_SMALLEST).expand(groups.shape)
    scales_error = 4 * _HALF_FP32_UNIT
    return ball.wider(ball.most * (_HALF_E4M3_UNIT + scales_error) + smallest.flatten(-2))


def _rounded_in_blocks(ball: Ball) -> Ball:
    """Rows of an expert and columns, 128 x 128 of which share a scale. Exact values stay exact."""
    num_rows = len(ball.center)
    padded = [
        torch.nn.functional.pad(part, (0, 0, 0, -num_rows % FP8_GROUP))
        for part in (ball.center, ball.radius)
    ]
    if not ball.radius.any():
        return Ball.exact(_fp8_weights(padded[0])[:num_rows])
    blocks = [
        part.unflatten(1, (-1, FP8_GROUP)).unflatten(0, (-1, FP8_GROUP)).transpose(1, 2)
        for part in padded
    ]
    rounded = _rounded_to_fp8(Ball(*(part.flatten(2) for part in blocks)), FP8_GROUP**2)
    return Ball(
        *(
            part.view(blocks[0].shape).transpose(1, 2).reshape(padded[0].shape)[:num_rows]
            for part in (rounded.center, rounded.radius)
        )
    )


def _rounded_to_e4m3(ball: Ball) -> Ball:
    """With the scale of 32 neighbours, at most twice the largest one's part of 448."""
    largest = ball.most.unflatten(-1, (-1, GROUP_SIZE)).amax(-1, keepdim=True)
    smallest = (2 * largest / _E4M3_MAX * _HALF_E4M3_SMALLEST).expand(-1, -1, GROUP_SIZE)
    return ball.wider(ball.most * _HALF_E4M3_UNIT + smallest.flatten(-2))
