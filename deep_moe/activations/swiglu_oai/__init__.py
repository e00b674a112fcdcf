"""The SwiGLU of gpt-oss and MiniMax-M3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..activation import (
    ALPHAS,
    LIMITS,
    LOWEST_OF_SILU,
    GatedActivation,
    clamped_slope,
    sigmoid_linear_slope,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SwigluOai(GatedActivation):
    """gate * sigmoid(alpha * gate) * (up + 1).

    Args:
        alpha: slope of gate in the argument of the sigmoid.
        limit: gate is at most this before, and up within plus and minus it.
    """

    name: ClassVar[str] = "swiglu_oai"
    struct: ClassVar[str] = "SwigluOai"
    clamp_parameter: ClassVar[str | None] = "limit"
    attributes: ClassVar[Mapping[str, tuple[str, ...]]] = {"alpha": ALPHAS, "limit": LIMITS}

    # Swiglu's, the sum of up and 1, and the product of alpha and gate.
    error_units: ClassVar[tuple[float, float]] = (13.0, 3.0)

    alpha: float = 1.702
    limit: float = 7.0

    @classmethod
    def exact_cases(cls) -> tuple[SwigluOai, ...]:
        return (cls(limit=24.0),)

    @classmethod
    def training_cases(cls) -> tuple[SwigluOai, ...]:
        return (cls(limit=1.5),)

    def sigmoid_argument(self, gate: torch.Tensor) -> torch.Tensor:
        return self.alpha * gate

    @property
    def lowest_gate(self) -> float:
        return LOWEST_OF_SILU / self.alpha

    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        return gate / (1 + (-self.alpha * gate).exp())

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return up.clamp(min=-self.limit, max=self.limit) + 1

    def gate_slope(self, gate: torch.Tensor) -> torch.Tensor:
        slope = sigmoid_linear_slope(gate.clamp(max=self.limit), self.alpha)
        return slope.masked_fill(gate > self.limit, 0.0)

    def up_slope(self, up: torch.Tensor) -> torch.Tensor:
        return clamped_slope(up, self.limit)
