"""ReGLU with a bound: an activation that is not part of deep_moe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from deep_moe.activations.activation import GatedActivation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ToyReglu(GatedActivation):
    """min(relu(gate), bound) * up.

    Args:
        bound: the largest value of gate's factor.
    """

    name: ClassVar[str] = "toy_reglu"
    struct: ClassVar[str] = "ToyReglu"
    error_units: ClassVar[tuple[float, float]] = (2.0, 0.0)
    attributes: ClassVar[dict[str, tuple[str, ...]]] = {"bound": ()}

    bound: float = 24.0

    @classmethod
    def exact_cases(cls) -> tuple[ToyReglu, ...]:
        return (cls(),)

    @classmethod
    def training_cases(cls) -> tuple[ToyReglu, ...]:
        return (cls(0.75),)

    @property
    def lowest_gate(self) -> float:
        return 0.0

    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        return gate.clamp(min=0, max=self.bound)

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return up

    def gate_slope(self, gate: torch.Tensor) -> torch.Tensor:
        inside = (gate > 0) & (gate <= self.bound)
        return inside.to(gate.dtype).where(~gate.isnan(), gate)

    def up_slope(self, up: torch.Tensor) -> torch.Tensor:
        return up.new_ones(up.shape)


ACTIVATION = ToyReglu
