"""`Activation`: everything that Python knows of an activation between the two linear layers.

Nothing here imports PyTorch before a method needs it: configs have activations, too.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

LOWEST_OF_SILU = -1.2784645427610738  # where x / (1 + e^-x) is lowest
MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal positive numbers
ALPHAS, LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")


@dataclass(frozen=True)
class Activation(ABC):
    """A function of Linear1's output, with parameters that are compiled in: positive numbers,
    rounded to float32, as the kernel has them. What has a gate is a `GatedActivation`.

    Attributes:
        name: in calls, and of its folders here and in include/deep_moe/activations.
        struct: in that folder's activation.cuh.
        has_gate: whether Linear1 has rows of gate above those of up. Without, it has those of up
            alone.
        clamp_parameter: which of the parameters `activation_clamp` sets.
        error_units: how far off the kernel's value may be, in halves of FP32's last place: so many,
            and so many more for every unit by which the sigmoid's argument is below zero.
        attributes: for each parameter the names that it has in models and their configs.
    """

    name: ClassVar[str]
    struct: ClassVar[str]
    has_gate: ClassVar[bool] = False
    clamp_parameter: ClassVar[str | None] = None
    error_units: ClassVar[tuple[float, float]]
    attributes: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):
            value = positive_float(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def exact_cases(cls) -> tuple[Self, ...]:
        """For fuzzing: those whose results are exact for the layers of trial/synthetic.py, where
        sums of gate are 0 or 32 and more, and sums of up are whole numbers."""
        return ()

    @classmethod
    def rounded_cases(cls) -> tuple[Self, ...]:
        """For fuzzing: those that leave no result exact."""
        return ()

    @property
    def parameters(self) -> dict[str, float]:
        """By name, in the order in which they are declared."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_l1_matrices(self) -> int:
        """Matrices of I rows, one below the other, in Linear1's weights."""
        return 2 if self.has_gate else 1

    @abstractmethod
    def up_factor(self, up: torch.Tensor) -> torch.Tensor:
        """The function of up. It never falls.

        Args:
            up: float64, of any shape.
        """

    def of_linear1(self, rows: torch.Tensor) -> torch.Tensor:
        """What comes of Linear1's output, [..., I], in the tensor's own precision. NaN stays NaN.

        Args:
            rows: [..., 2*I], gate before up, or without a gate [..., I].
        """
        return self.up_factor(rows)

    def to_dict(self) -> dict[str, str | float]:
        """Name and parameters, as configs report them.

        Examples:
            >>> from deep_moe.activations import Situ
            >>> Situ().to_dict()
            {'activation': 'situ', 'activation_beta': 4.0, 'activation_linear_beta': 25.0}
        """
        named = {f"activation_{name}": value for name, value in self.parameters.items()}
        return {"activation": self.name, **named}


@dataclass(frozen=True)
class GatedActivation(Activation):
    """A product of a function of gate and one of up. Training has those whose slopes are here."""

    has_gate: ClassVar[bool] = True

    @classmethod
    def training_cases(cls) -> tuple[Self, ...]:
        """For fuzzing of the differentiable layer, with bounds below what sums get to."""
        return ()

    def sigmoid_argument(self, gate: torch.Tensor) -> torch.Tensor:
        """What the sigmoid in `gate_factor` is of. It never falls.

        Args:
            gate: float64, of any shape.
        """
        return gate

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

    def of_linear1(self, rows: torch.Tensor) -> torch.Tensor:
        return self(*rows.chunk(2, dim=-1))


def sigmoid_linear_slope(x: torch.Tensor, slope: float) -> torch.Tensor:
    """The derivative of x / (1 + e^(-slope*x))."""
    sigma = 1 / (1 + (-slope * x).exp())
    return sigma * (1 + slope * x * (1 - sigma))


def clamped_slope(x: torch.Tensor, limit: float) -> torch.Tensor:
    """The derivative of x within +-limit: 1, and 0 beyond."""
    return x.new_ones(x.shape).masked_fill(x.abs() > limit, 0.0)


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
