"""What happens between the products, as an interface with two implementations.

`KernelSteps` launches our kernels: on a GPU, or, for tensors on a CPU and a target's name, in the
emulator. `PlainSteps` says the same in PyTorch, for CPUs and for float64; with BF16 it rounds where
the kernels round. Only their exponentials differ, and the order of the gate gradient's sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from deep_moe.activations import GatedActivation

from .quantized import QuantizedColumns, QuantizedWeights
from .rows import Rows


@dataclass(frozen=True)
class Biases:
    """gate, up: [experts, intermediate]; down: [experts, hidden]. In float32, or float64 if the
    layer runs in it."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Steps(Protocol):
    """R: rows, H: hidden, I: intermediate size. Weights of slots are float32 [tokens, topk]."""

    def route(self, topk_idx: torch.Tensor, num_experts: int) -> Rows:
        """Slots sorted by expert; ids outside of 0 to num_experts - 1 are no experts."""
        ...

    def gather(
        self, tokens: torch.Tensor, rows: Rows, *, rounds_to_mxfp8: bool = False
    ) -> torch.Tensor:
        """[R, H]: each row its slot's token, padding zero."""
        ...

    def activate(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        biases: Biases | None,
        activation: GatedActivation,
        rows: Rows,
        *,
        rounds_to_mxfp8: bool = False,
        quantizes: bool = False,
    ) -> torch.Tensor:
        """[R, I]: activation(gate + bias, up + bias), padding zero. gate and up: [R, I], rows of
        the same stride. quantizes: as `quantize_rows` makes them."""
        ...

    def activate_backward(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        biases: Biases | None,
        activation: GatedActivation,
        rows: Rows,
        *,
        d_activated: torch.Tensor,
        d_rows: torch.Tensor | None,
        topk_weights: torch.Tensor,
        d_gate: torch.Tensor,
        d_up: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fills d_gate and d_up [R, I]; returns the activation's output times the slots' weights
        [R, I] and the gradient of these [tokens, topk].

        d_activated [R, I], d_rows [R, H]: gradients of the activation's output and of the layer's,
        both without the slots' weights. d_rows is only read with biases.
        """
        ...

    def scatter(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None,
        rows: Rows,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, H]: for each token the sum of weight * (first + second + bias) over its used
        slots, in their order. first, second: [R, H]; bias: [experts, H]; out: where to, or None
        for a new tensor."""
        ...

    def quantize_rows(self, values: torch.Tensor) -> torch.Tensor:
        """BF16 [R, K] as quantized rows (quantized.py)."""
        ...

    def dequantize_rows(self, rows: torch.Tensor, num_values: int) -> torch.Tensor:
        """The inverse, BF16 [R, num_values]."""
        ...

    def quantize_weights(self, weights: torch.Tensor) -> QuantizedWeights:
        """Of [experts, K, N], contiguous or a transposed view of what is."""
        ...

    def quantize_weights_both_ways(
        self, weights: torch.Tensor
    ) -> tuple[QuantizedWeights, QuantizedWeights]:
        """`quantize_weights` of weights and of weights.transpose(1, 2), read once. K and N are
        multiples of 128."""
        ...

    def num_differences(self, weights: torch.Tensor, quantized: QuantizedWeights) -> torch.Tensor:
        """One number on the device, zero where `quantize_weights` of these weights has the bits of
        quantized."""
        ...

    def quantized_product(
        self, inputs: torch.Tensor, weights: QuantizedWeights, rows: Rows
    ) -> torch.Tensor:
        """Quantized rows times their experts' weights, BF16 [R, N]. Rows behind the last expert's
        end hold anything."""
        ...

    def quantize_columns(
        self, values: torch.Tensor, rows: Rows, *, gathers: bool = False
    ) -> QuantizedColumns:
        """Of BF16 rows [R, K], or with gathers of those that `gather` makes of tokens. K is a
        multiple of 128."""
        ...

    def quantize_both(
        self, values: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, QuantizedColumns]:
        """`quantize_rows` and `quantize_columns` of rows [R, K], which are read once."""
        ...

    def quantized_weight_gradient(
        self,
        inputs: QuantizedColumns,
        d_outputs: QuantizedColumns,
        rows: Rows,
        *,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """inputs [R, K] transposed times d_outputs [R, N], of each expert: BF16 [experts, K, N]. Or
        sums, BF16 or float32, with these added to it, rounded to its type before."""
        ...

    def round_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """[experts, K, N] as MXFP8 would hold them, a scale for 32 neighbours along K."""
        ...
