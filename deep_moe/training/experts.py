"""The layer on one rank: the order of steps and products, forward and backward.

    forward                                             backward
    X   = gather(x)                    [R, H]           dY  = gather(d_out)                  [R, H]
    H1  = X W1, H3 = X W3              [R, I]           dA  = dY W2^T                        [R, I]
    A   = activation(H1, H3)           [R, I]           gA, dH1, dH3, d_weight
    Y   = A W2                         [R, H]           dW2 = gA^T dY
    out = scatter(weight * Y)          [T, H]           X   = gather(x)
                                                        dW1 = X^T dH1, dW3 = X^T dH3
                                                        d_x = scatter(dH1 W1^T + dH3 W3^T)

Besides x and the routing, the backward pass gets only H1 and H3 from the forward pass. With
`recompute` it computes them again. dY and dA are the gradients for a routing weight of 1: the
weight is multiplied in later, where its own gradient is A . dA. So Linear2's output need not be
kept, and a weight of zero divides nothing.

`gather` and `scatter` are those of the call's `Ways`: over several ranks they travel. What the
backward pass gathers there are the tokens that this rank *received*; its own belong to other ranks'
experts.

What is kept of H1 and H3 may be quantized: then only the activation's gradients see the rounding.

With W1 and W3 in one tensor [experts, H, 2I] their products are one, and its halves are H1 and H3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from deep_moe.activations import GatedActivation

from .gathered_weights import GatheredWeight
from .kept_weights import Rounding, quantized_once
from .products import expert_sums, grouped_product, grouped_weight_gradient
from .quantized import QuantizedWeights, num_other_bytes
from .rows import Rows, aligned
from .steps import Biases, Steps
from .ways import Ways

Precision = Literal["bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad"]
FP8_DATA_GRADIENTS: tuple[Precision, ...] = ("fp8_dgrad", "fp8_wgrad")
"""Whose products of data gradients multiply E4M3; those of "fp8_wgrad" for weights, too."""
FP8_PRECISIONS: tuple[Precision, ...] = ("fp8", *FP8_DATA_GRADIENTS)
"""Whose forward pass multiplies E4M3 with a float32 scale for 128 values."""


@dataclass(frozen=True)
class Weights:
    """gate: [experts, H, I], or gate and up in one [experts, H, 2I], then up is None. up:
    [experts, H, I]. down: [experts, I, H]."""

    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor


@dataclass(frozen=True)
class Linear1:
    """Linear1's output. gate: [R, I], or both halves in [R, 2I], then up is None."""

    gate: torch.Tensor
    up: torch.Tensor | None

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate, up: [R, I], maybe views."""
        if self.up is not None:
            return self.gate, self.up
        gate, up = self.gate.chunk(2, dim=1)
        return gate, up

    def empty_like(self) -> Linear1:
        return Linear1(
            torch.empty_like(self.gate), None if self.up is None else torch.empty_like(self.up)
        )


@dataclass(frozen=True)
class Transposed:
    """Quantized weights as the products of data gradients take them. up: None where gate has
    both."""

    gate: QuantizedWeights
    up: QuantizedWeights | None
    down: QuantizedWeights


@dataclass(frozen=True)
class WeightSums:
    """What the gradients of `Weights` are added to, in their shapes, with any strides. None for one
    that is made anew."""

    gate: torch.Tensor | None = None
    up: torch.Tensor | None = None
    down: torch.Tensor | None = None


@dataclass(frozen=True)
class Gradients:
    """None where nobody wants one. x: [tokens, H]. topk_weights: [tokens, topk]."""

    x: torch.Tensor | None
    topk_weights: torch.Tensor
    weights: Weights | None
    biases: Biases | None


@dataclass(frozen=True)
class Experts:
    """A rank's experts and how they compute."""

    weights: Weights
    biases: Biases | None
    activation: GatedActivation
    precision: Precision
    steps: Steps

    def forward(
        self, received: torch.Tensor, ways: Ways, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, Linear1, Transposed | None]:
        """The layer's output [tokens, H] and Linear1's, and for products of data gradients that
        multiply E4M3 the weights, quantized on the way. received: of x."""
        rows = ways.rows
        linear1, gate_up = self._linear1(received, ways)
        activated = self.steps.activate(
            *linear1.halves(),
            self.biases,
            self.activation,
            rows,
            rounds_to_mxfp8=self.precision == "mxfp8",
            quantizes=self._quantizes,
        )
        product, down = self._forward_product(activated, self.weights.down, rows)
        bias = None if self.biases is None else self.biases.down
        out = ways.scatter(product, None, topk_weights=topk_weights, bias=bias)
        gate, up = gate_up
        transposed = None
        if gate is not None and down is not None:
            transposed = Transposed(gate, up, down)
        return out, linear1, transposed

    def backward(
        self,
        d_out: torch.Tensor,
        x: torch.Tensor,
        received: torch.Tensor | None,
        ways: Ways,
        topk_weights: torch.Tensor,
        linear1: Linear1 | None,
        *,
        transposed: Transposed | None = None,
        sums: WeightSums | None = None,
        needs_x: bool = True,
        needs_weights: bool = True,
        needs_biases: bool = True,
    ) -> Gradients:
        """d_out, x, topk_weights: of this rank's tokens. received: of x, or None to receive it
        again; linear1: what `forward` returned, perhaps quantized, or None to make it again;
        transposed: what `forward` returned, or None to quantize weights again. sums: what gradients
        of weights are added to; those are then returned.
        Products are those of the weights as they are, whatever the forward pass rounded them to,
        but for those of quantized gradients."""
        weights, steps, rows = self.weights, self.steps, ways.rows
        offs = rows.offs
        sums = WeightSums() if sums is None else sums
        if received is None and (linear1 is None or needs_weights):
            received = ways.receive(x)
        if linear1 is None:
            assert received is not None
            linear1, _ = self.of_forward()._linear1(received, ways)
        else:
            linear1 = self._dequantized(linear1)
        w1 = w3 = w2 = None
        if transposed is not None:
            w1, w3, w2 = transposed.gate, transposed.up, transposed.down
        received_d_out = ways.receive(d_out)
        sums_e4m3 = needs_weights and self.precision == "fp8_wgrad"
        d_rows = d_columns = None
        if sums_e4m3:
            d_columns = ways.gather_columns(received_d_out)
        if self.biases is not None or (needs_weights and not sums_e4m3) or not self._quantizes_d:
            d_rows = ways.gather(received_d_out)
        row_weights = ways.receive_weights(topk_weights)
        if self._quantizes_d:
            # Once for a token, not for each of its rows.
            quantized = ways.gather(steps.quantize_rows(received_d_out))
            d_activated = self._quantized_data_gradient(quantized, weights.down, w2, rows)
            del quantized
        else:
            assert d_rows is not None
            d_activated = grouped_product(d_rows, weights.down.transpose(1, 2), offs)
        del received_d_out
        d_linear1 = linear1.empty_like()
        d_gate, d_up = d_linear1.halves()
        weighted, d_row_weights = steps.activate_backward(
            *linear1.halves(),
            self.biases,
            self.activation,
            rows,
            d_activated=d_activated,
            d_rows=d_rows,
            topk_weights=row_weights,
            d_gate=d_gate,
            d_up=d_up,
        )
        # Each is freed before the next large one is made.
        del d_activated, linear1
        d_biases = None
        if self.biases is not None and needs_biases:
            assert d_rows is not None
            d_biases = self._bias_gradients(d_rows, d_gate, d_up, rows, row_weights)
        d_halves: tuple[torch.Tensor, ...] = (d_linear1.gate,)
        if d_linear1.up is not None:
            d_halves = (d_linear1.gate, d_linear1.up)
        del d_linear1, d_gate, d_up
        if sums_e4m3:
            assert d_columns is not None
            columns = steps.quantize_columns(weighted, rows)
            del weighted, d_rows
            d_down = steps.quantized_weight_gradient(columns, d_columns, rows, sums=sums.down)
            del columns, d_columns
            both = [steps.quantize_both(half, rows) for half in d_halves]
            d_halves = tuple(quantized for quantized, _ in both)
            assert received is not None
            columns = ways.gather_columns(received)
            del received
            d_gate_up = [
                steps.quantized_weight_gradient(columns, half, rows, sums=of)
                for (_, half), of in zip(both, (sums.gate, sums.up), strict=False)
            ]
            del columns, both
        elif needs_weights:
            assert d_rows is not None
            d_down = _added(grouped_weight_gradient(weighted, d_rows, offs), sums.down)
            del weighted, d_rows
            assert received is not None
            gathered = ways.gather(received)
            del received
            d_gate_up = [
                _added(grouped_weight_gradient(gathered, half, offs), of)
                for half, of in zip(d_halves, (sums.gate, sums.up), strict=False)
            ]
            del gathered
        else:
            del weighted, d_rows
        d_weights = None
        if needs_weights:
            d_second = d_gate_up[1] if len(d_gate_up) > 1 else None
            d_weights = Weights(d_gate_up[0], d_second, d_down)
        d_x = None
        if needs_x:
            if self._quantizes_d and not sums_e4m3:
                d_halves = tuple(steps.quantize_rows(half) for half in d_halves)
            first = self._data_gradient(d_halves[0], weights.gate, w1, rows)
            second = None
            if weights.up is not None:
                second = self._data_gradient(d_halves[1], weights.up, w3, rows)
            d_x = ways.scatter(first, second)
        return Gradients(d_x, ways.return_weights(d_row_weights), d_weights, d_biases)

    def of_forward(self) -> Experts:
        """Those whose forward pass quantizes nothing for the backward pass."""
        return replace(self, precision="fp8") if self._quantizes_d else self

    def quantized(self, linear1: Linear1) -> Linear1:
        """As E4M3 with scales: half the memory for the time until the backward pass."""
        up = None if linear1.up is None else self.steps.quantize_rows(linear1.up)
        return Linear1(self.steps.quantize_rows(linear1.gate), up)

    def _dequantized(self, linear1: Linear1) -> Linear1:
        """What was kept, as `forward` returned it or quantized, which makes rows narrower."""
        width = self.weights.gate.shape[2]
        if linear1.gate.shape[1] == width:
            return linear1
        up = None if linear1.up is None else self.steps.dequantize_rows(linear1.up, width)
        return Linear1(self.steps.dequantize_rows(linear1.gate, width), up)

    def _linear1(
        self, received: torch.Tensor, ways: Ways
    ) -> tuple[Linear1, tuple[QuantizedWeights | None, QuantizedWeights | None]]:
        """And what `_forward_product` has besides, of gate and up."""
        if self._quantizes:
            # Once for a token, not for each of its rows.
            inputs = ways.gather(self.steps.quantize_rows(received))
        else:
            inputs = ways.gather(received, rounds_to_mxfp8=self.precision == "mxfp8")
        rows = ways.rows
        gate, w1 = self._forward_product(inputs, self.weights.gate, rows)
        if self.weights.up is None:
            return Linear1(gate, None), (w1, None)
        up, w3 = self._forward_product(inputs, self.weights.up, rows)
        return Linear1(gate, up), (w1, w3)

    def _forward_product(
        self, inputs: torch.Tensor, weights: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, QuantizedWeights | None]:
        """[R, N], and for products of quantized gradients the weights.

        Weights are rounded in every pass, and the rounded ones freed behind it, but for those that
        are frozen: an optimizer need not count a tensor's version up, so nothing cheap tells that
        weights are the same. inputs: as the precision has them."""
        if self.precision == "bf16":
            return grouped_product(inputs, weights, rows.offs), None
        if isinstance(weights, GatheredWeight):
            gathered = weights.box.in_order(for_gradients=False)
            return self.steps.quantized_product(inputs, gathered, rows), None
        rounding = Rounding(self._rounded, self._num_rounded_differences)
        rounded = quantized_once(weights, (self.precision, type(self.steps)), rounding)
        if not self._quantizes:
            return grouped_product(inputs, rounded[0], rows.offs), None
        quantized = QuantizedWeights(*rounded[:2])
        product = self.steps.quantized_product(inputs, quantized, rows)
        return product, QuantizedWeights(*rounded[2:]) if rounded[2:] else None

    def _data_gradient(
        self,
        d_outputs: torch.Tensor,
        weights: torch.Tensor,
        transposed: QuantizedWeights | None,
        rows: Rows,
    ) -> torch.Tensor:
        """d_outputs [R, N], as the precision has them, times the transposed weights
        [experts, K, N]: [R, K]."""
        if self._quantizes_d:
            return self._quantized_data_gradient(d_outputs, weights, transposed, rows)
        return grouped_product(d_outputs, weights.transpose(1, 2), rows.offs)

    def _quantized_data_gradient(
        self,
        d_outputs: torch.Tensor,
        weights: torch.Tensor,
        transposed: QuantizedWeights | None,
        rows: Rows,
    ) -> torch.Tensor:
        """Of quantized rows. The weights' values are those of the forward pass, for a block of
        128 x 128 is one in either direction. transposed: None to quantize them again."""
        if transposed is None and isinstance(weights, GatheredWeight):
            transposed = weights.box.in_order(for_gradients=True)
        if transposed is None:
            kind = ("transposed", type(self.steps))
            rounding = Rounding(self._transposed, self._num_transposed_differences)
            transposed = QuantizedWeights(*quantized_once(weights, kind, rounding))
        return self.steps.quantized_product(d_outputs, transposed, rows)

    def _transposed(self, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As the products of data gradients take them: each K by rows."""
        quantized = self.steps.quantize_weights(weights.transpose(1, 2))
        return quantized.values, quantized.scales

    def _num_transposed_differences(
        self, weights: torch.Tensor, transposed: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return self.steps.num_differences(weights.transpose(1, 2), QuantizedWeights(*transposed))

    @property
    def _quantizes(self) -> bool:
        return self.precision in FP8_PRECISIONS

    @property
    def _quantizes_d(self) -> bool:
        return self.precision in FP8_DATA_GRADIENTS

    def _rounded(self, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As the forward pass multiplies them, and the backward pass where it multiplies E4M3."""
        if self._quantizes_d:
            both = self.steps.quantize_weights_both_ways(weights)
            return tuple(tensor for one in both for tensor in (one.values, one.scales))
        if self._quantizes:
            quantized = self.steps.quantize_weights(weights)
            return quantized.values, quantized.scales
        return (self.steps.round_weights(weights.contiguous()),)

    def _num_rounded_differences(
        self, weights: torch.Tensor, rounded: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        if not self._quantizes:
            return num_other_bytes(self._rounded(weights)[0], rounded[0])
        if self._quantizes_d and weights.is_contiguous():
            # Both are of one reading, so one tells. That in the weights' own order is compared
            # without a way through shared memory.
            return self._num_transposed_differences(weights, rounded[2:])
        return self.steps.num_differences(weights, QuantizedWeights(*rounded[:2]))

    def _bias_gradients(
        self,
        d_rows: torch.Tensor,
        d_gate: torch.Tensor,
        d_up: torch.Tensor,
        rows: Rows,
        topk_weights: torch.Tensor,
    ) -> Biases:
        """Sums over each expert's rows; of Linear2's bias times the slots' weights."""
        slots = rows.slot_of_row.long()
        weights = topk_weights.reshape(-1)[slots.clamp(min=0)].masked_fill(slots < 0, 0)
        return Biases(
            expert_sums(d_gate, rows.offs),
            expert_sums(d_up, rows.offs),
            expert_sums(d_rows, rows.offs, weights),
        )


def _added(gradient: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
    return gradient if sums is None else sums.add_(gradient)


def widened(biases: Biases, dtype: torch.dtype) -> Biases:
    """As the steps take them: float32, or float64 for a layer in it."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    return replace(
        biases,
        gate=aligned(biases.gate.to(wide)),
        up=aligned(biases.up.to(wide)),
        down=aligned(biases.down.to(wide)),
    )
