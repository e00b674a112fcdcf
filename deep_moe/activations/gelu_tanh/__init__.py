"""The GELU of Gemma-4, in its approximation by tanh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..activation import GatedActivation

if TYPE_CHECKING:
    import torch

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
_LOWEST_GATE = -0.7524614220710163
_SATURATED = 100.0  # beyond plus and minus it the sigmoid is 1 or 0, also in float64


@dataclass(frozen=True)
class GeluTanh(GatedActivation):
    """gelu(gate) * up, with gelu(g) = 0.5 * g * (1 + tanh(sqrt(2/pi) * (g + 0.044715 * g^3))).

    0.5 * (1 + tanh(t)) is sigmoid(2t), which cancels no bits where t is negative.
    """

    name: ClassVar[str] = "gelu_tanh"
    struct: ClassVar[str] = "GeluTanh"

    # Swiglu's, and five more roundings of the sigmoid's argument and its constants.
    error_units: ClassVar[tuple[float, float]] = (12.0, 7.0)

    @classmethod
    def exact_cases(cls) -> tuple[GeluTanh, ...]:
        return (cls(),)

    @classmethod
    def training_cases(cls) -> tuple[GeluTanh, ...]:
        return (cls(),)

    def sigmoid_argument(self, gate: torch.Tensor) -> torch.Tensor:
        return gate * (_LINEAR + _CUBIC * gate.square())

    @property
    def lowest_gate(self) -> float:
        return _LOWEST_GATE

    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        return gate / (1 + (-self.sigmoid_argument(gate)).exp())

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return up

    def gate_slope(self, gate: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(-_SATURATED, _SATURATED)
        sigma = 1 / (1 + (-self.sigmoid_argument(gate)).exp())
        return sigma * (1 + gate * (_LINEAR + 3 * _CUBIC * gate.square()) * (1 - sigma))

    def up_slope(self, up: torch.Tensor) -> torch.Tensor:
        return up.new_ones(up.shape)
