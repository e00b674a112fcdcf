"""SiTU: SiLU and the linear unit, each with a bound that it approaches smoothly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .activation import Activation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Situ(Activation):
    """beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)."""

    name: ClassVar[str] = "situ"
    struct: ClassVar[str] = "Situ"

    beta: float = 4.0
    linear_beta: float = 25.0

    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        return _bounded(gate, self.beta) / (1 + (-gate).exp())

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return _bounded(up, self.linear_beta)


def _bounded(x: torch.Tensor, bound: float) -> torch.Tensor:
    """bound * tanh(x / bound), also where a large bound makes the quotient subnormal."""
    import torch

    quotient = x / bound
    is_argument = quotient.abs() < torch.finfo(x.dtype).eps ** 0.5  # then tanh rounds to it
    return x.where(is_argument, bound * quotient.tanh())
