"""SiTU: SiLU and the linear unit, each with a bound that it approaches smoothly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ..activation import LOWEST_OF_SILU, GatedActivation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Situ(GatedActivation):
    """beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta).

    Args:
        beta: bound of the gate's function.
        linear_beta: bound of up.
    """

    name: ClassVar[str] = "situ"
    struct: ClassVar[str] = "Situ"
    attributes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "beta": ("gate_softcap", "mlp_gate_softcap"),
        "linear_beta": ("up_softcap", "mlp_up_softcap"),
    }

    # Swiglu's, and for each bound 32: where tanh changes over to exponentials, at a quarter of the
    # bound, 1 - 2 / (1 + e^2t) has cancelled two bits, which makes 20 of their errors; the series
    # leaves out 6.
    error_units: ClassVar[tuple[float, float]] = (76.0, 2.0)

    beta: float = 4.0
    linear_beta: float = 25.0

    @classmethod
    def rounded_cases(cls) -> tuple[Situ, ...]:
        return (cls(),)

    @classmethod
    def training_cases(cls) -> tuple[Situ, ...]:
        return (cls(beta=1.0, linear_beta=2.0),)

    @property
    def lowest_gate(self) -> float:
        return _lowest_gate(self.beta)

    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        return _bounded(gate, self.beta) / (1 + (-gate).exp())

    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        return _bounded(up, self.linear_beta)

    def gate_slope(self, gate: torch.Tensor) -> torch.Tensor:
        sigma = 1 / (1 + (-gate).exp())
        bounded = _bounded(gate, self.beta)
        return sigma * (_bounded_slope(gate, self.beta) + bounded * (1 - sigma))

    def up_slope(self, up: torch.Tensor) -> torch.Tensor:
        return _bounded_slope(up, self.linear_beta)


def _bounded(x: torch.Tensor, bound: float) -> torch.Tensor:
    """bound * tanh(x / bound), also where a large bound makes the quotient subnormal."""
    import torch

    quotient = x / bound
    is_argument = quotient.abs() < torch.finfo(x.dtype).eps ** 0.5  # then tanh rounds to it
    return x.where(is_argument, bound * quotient.tanh())


def _bounded_slope(x: torch.Tensor, bound: float) -> torch.Tensor:
    """The derivative of bound * tanh(x / bound)."""
    tanh = _bounded(x, bound) / bound
    return (1 - tanh) * (1 + tanh)


@lru_cache(maxsize=64)
def _lowest_gate(beta: float) -> float:
    """Where the derivative of log(tanh(x / beta) / (1 + e^-x)) is zero. With y = -x that is where
    2 / (beta * sinh(2y / beta)), which only falls and is at most 1/y, meets 1 / (1 + e^-y), which
    only rises."""
    low, high = 0.0, -LOWEST_OF_SILU
    for _ in range(100):
        y = (low + high) / 2
        argument = 2 * y / beta
        falling = 0.0 if argument > 700 else 2 / (beta * math.sinh(argument))
        low, high = (y, high) if falling > 1 / (1 + math.exp(-y)) else (low, y)
    return -high
