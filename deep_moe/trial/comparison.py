"""Compares a result with the reference: which values are right, how many are equal, and how far off
the others are, in BF16 units and as an angle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .bounds import Bounds


@dataclass(frozen=True)
class Comparison:
    """One rank's output against the reference.

    A unit is the distance between neighbouring BF16 numbers. NaN is infinitely far from everything,
    itself included; it is right where the reference has it, as for tokens that hold NaN.
    """

    num_tokens: int
    num_values: int
    num_equal: int
    num_near: int  # at most one unit away, the equal ones included
    num_wrong: int  # outside of the bounds
    num_wrong_tokens: int  # that hold such a value, or whose error as a vector is too long
    max_units: float
    cosine_distance: float

    @property
    def is_exact(self) -> bool:
        """Equal bit for bit."""
        return self.num_equal == self.num_values

    @property
    def is_right(self) -> bool:
        """All that differs is explained by rounding."""
        return self.num_wrong_tokens == 0


def compare(y: torch.Tensor, expected: torch.Tensor | Bounds) -> Comparison:
    """Compare a BF16 tensor, [tokens, hidden] or of one token, with one of its shape that it has to
    equal, or with what `reference_bounds` says of it.

    >>> compare(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)).is_exact
    True
    """
    reference = expected.y if isinstance(expected, Bounds) else expected
    for name, tensor in (("y", y), ("expected", reference)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16; got {tensor.dtype}")
    if y.shape != reference.shape:
        raise ValueError(
            f"y must have expected's shape {list(reference.shape)}; got {list(y.shape)}"
        )
    y, reference = y.detach().cpu(), reference.detach().cpu()
    units = (_rank_among_numbers(y) - _rank_among_numbers(reference)).abs().double()
    both_nan = y.isnan() & reference.isnan()
    units[y.isnan() | reference.isnan()] = torch.inf
    if isinstance(expected, Bounds):
        is_right = both_nan | (y >= expected.low.cpu()) & (y <= expected.high.cpu())
        # An error that is NaN is not too long: its values are told by themselves.
        errors = (y.double() - reference.double()).norm(dim=-1)
        is_token_wrong = ~is_right.all(dim=-1) | (errors > expected.max_token_error.cpu())
    else:
        is_right = both_nan | (units == 0)
        is_token_wrong = ~is_right.all(dim=-1)
    return Comparison(
        num_tokens=is_token_wrong.numel(),
        num_values=y.numel(),
        num_equal=int((units == 0).sum()),
        num_near=int((units <= 1).sum()),
        num_wrong=int((~is_right).sum()),
        num_wrong_tokens=int(is_token_wrong.sum()),
        max_units=float(units.max()) if y.numel() else 0.0,
        cosine_distance=cosine_distance(y.double().flatten(), reference.double().flatten()),
    )


def _rank_among_numbers(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the BF16 numbers, neighbours one apart, both zeros at 0."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def cosine_distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    """1 - cos of the angle; 0 between two zero vectors, 1 between a zero and another vector."""
    norms = float(y.norm() * expected.norm())
    if norms == 0:
        return 0.0 if bool((y == expected).all()) else 1.0
    distance = 1 - float(y @ expected) / norms
    return max(distance, 0.0) if distance == distance else 1.0
