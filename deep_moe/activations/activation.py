"""`Activation`: all that is known of what comes between the two linear layers.

Nothing here imports PyTorch before a method needs it: configs have activations, too.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

LOWEST_OF_SILU = -1.2784645427610738  # where x / (1 + e^-x) is lowest
MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal positive numbers


@dataclass(frozen=True)
class Activation(ABC):
    """A product of a function of gate and one of up, with parameters that are compiled in: positive
    numbers, rounded to float32, as the kernel has them.

    Attributes:
        name: in calls, of the header in include/deep_moe/activations, and of this object's file.
        struct: in that header.
        clamp_parameter: which of the parameters `activation_clamp` sets.
        error_units: how far off the kernel's value may be, in halves of FP32's last place: so many,
            and so many more for every unit by which slope * gate is below zero.
    """

    name: ClassVar[str]
    struct: ClassVar[str]
    clamp_parameter: ClassVar[str | None] = None
    error_units: ClassVar[tuple[float, float]]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = positive_float(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @property
    def parameters(self) -> dict[str, float]:
        """By name, in the order in which they are declared."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def slope(self) -> float:
        """Of gate in the argument of the sigmoid."""
        return 1.0

    @property
    @abstractmethod
    def lowest_gate(self) -> float:
        """Where `gate_factor` is lowest."""

    @abstractmethod
    def gate_factor(self, gate: torch.Tensor) -> torch.Tensor:
        """The function of gate. It falls down to its lowest value, and never behind it.

        Args:
            gate: float64, of any shape.
        """

    @abstractmethod
    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        """The function of up. It never falls.

        Args:
            up: float64, of any shape.
        """

    @abstractmethod
    def gate_slope(self, gate: torch.Tensor) -> torch.Tensor:
        """The derivative of `gate_factor`; 0 beyond a limit, NaN for NaN.

        Args:
            gate: float64, of any shape.
        """

    @abstractmethod
    def up_slope(self, up: torch.Tensor) -> torch.Tensor:
        """The derivative of `up_factor`; 0 beyond a limit.

        Args:
            up: float64, of any shape.
        """

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """In the tensors' own precision. NaN stays NaN."""
        return self.gate_factor(gate) * self.up_factor(up)

    def to_dict(self) -> dict[str, str | float]:
        """Name and parameters, as configs report them.

        Examples:
            >>> from deep_moe.activations import Situ
            >>> Situ().to_dict()
            {'activation': 'situ', 'activation_beta': 4.0, 'activation_linear_beta': 25.0}
        """
        named = {f"activation_{name}": value for name, value in self.parameters.items()}
        return {"activation": self.name, **named}


def sigmoid_linear_slope(x: torch.Tensor, slope: float) -> torch.Tensor:
    """The derivative of x / (1 + e^(-slope*x))."""
    sigma = 1 / (1 + (-slope * x).exp())
    return sigma * (1 + slope * x * (1 - sigma))


def positive_float(
    name: str, value: object, *, or_none: bool = False, or_infinite: bool = False
) -> float:
    """`value` as float32 has it, or an error that names it. or_none: for the error's words;
    or_infinite: +inf is allowed, too."""
    allowed = "a positive number that float32 holds"
    if or_none:
        allowed = f"None or {allowed}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {allowed}; got {value!r}")
    if or_infinite and value == math.inf:
        return math.inf
    if not MIN_FLOAT32 <= value <= MAX_FLOAT32:
        raise ValueError(f"{name} must be {allowed}; got {value}")
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)
