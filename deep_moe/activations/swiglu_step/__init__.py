"""The SwiGLU of Step-3.5 and 3.7, whose limit comes behind SiLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..activation import (
    LIMITS,
    LOWEST_OF_SILU,
    GatedActivation,
    clamped_slope,
    sigmoid_linear_slope,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SwigluStep(GatedActivation):
    """silu(gate) * up, with bounds behind SiLU.

    Args:
        limit: silu(gate) is at most this, and up within plus and minus it.
    """

    name: ClassVar[str] = "swiglu_step"
    struct: ClassVar[str] = "SwigluStep"
    clamp_parameter: ClassVar[str | None] = "limit"
    attributes: ClassVar[Mapping[str, tuple[str, ...]]] = {"limit": LIMITS}

    error_units: ClassVar[tuple[float, float]] = (12.0, 2.0)  # Swiglu's

    limit: float = 7.0

    @classmethod
    def exact_cases(cls) -> tuple[SwigluStep, ...]:
        return (cls(24.0),)

    @classmethod
    def training_cases(cls) -> tuple[SwigluStep, ...]:
        return (cls(0.75),)

    @property
    def lowest_gate(self) -> float:
        return LOWEST_OF_SILU

    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        return _silu(gate).clamp(max=self.limit)

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return up.clamp(min=-self.limit, max=self.limit)

    def gate_slope(self, gate: torch.Tensor) -> torch.Tensor:
        return sigmoid_linear_slope(gate, 1.0).masked_fill(_silu(gate) > self.limit, 0.0)

    def up_slope(self, up: torch.Tensor) -> torch.Tensor:
        return clamped_slope(up, self.limit)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())
