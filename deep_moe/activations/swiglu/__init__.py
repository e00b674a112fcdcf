"""SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..activation import (
    LIMITS,
    LOWEST_OF_SILU,
    GatedActivation,
    clamped_slope,
    positive_float,
    sigmoid_linear_slope,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Swiglu(GatedActivation):
    """silu(gate) * up.

    Args:
        clamp: gate is at most this before, and up within plus and minus it. Nothing is, if it is
            infinite.
    """

    name: ClassVar[str] = "swiglu"
    struct: ClassVar[str] = "Swiglu"
    clamp_parameter: ClassVar[str | None] = "clamp"
    attributes: ClassVar[Mapping[str, tuple[str, ...]]] = {"clamp": LIMITS}

    # ex2.approx may be off by 2 units in the last place and rcp.approx by 1, and there are six more
    # roundings, that of the exponent's argument in proportion to it.
    error_units: ClassVar[tuple[float, float]] = (12.0, 2.0)

    clamp: float = math.inf

    def __post_init__(self) -> None:
        clamp = positive_float("clamp", self.clamp, or_infinite=True)
        object.__setattr__(self, "clamp", clamp)

    @classmethod
    def exact_cases(cls) -> tuple[Swiglu, ...]:
        return cls(), cls(24.0)

    @classmethod
    def training_cases(cls) -> tuple[Swiglu, ...]:
        return cls(), cls(0.75)

    @property
    def lowest_gate(self) -> float:
        return LOWEST_OF_SILU

    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.clamp)
        return gate / (1 + (-gate).exp())

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return up.clamp(min=-self.clamp, max=self.clamp)

    def gate_slope(self, gate: torch.Tensor) -> torch.Tensor:
        slope = sigmoid_linear_slope(gate.clamp(max=self.clamp), 1.0)
        return slope.masked_fill(gate > self.clamp, 0.0)

    def up_slope(self, up: torch.Tensor) -> torch.Tensor:
        return clamped_slope(up, self.clamp)
