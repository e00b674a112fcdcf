"""The squared ReLU of Nemotron-3, which has no gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..activation import Activation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Relu2(Activation):
    """relu(up) ** 2, of Linear1's rows alone."""

    name: ClassVar[str] = "relu2"
    struct: ClassVar[str] = "Relu2"

    error_units: ClassVar[tuple[float, float]] = (2.0, 0.0)  # the square, and the routing weight

    @classmethod
    def exact_cases(cls) -> tuple[Relu2, ...]:
        return (cls(),)

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return up.clamp(min=0).square()
