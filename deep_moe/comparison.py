"""How near a result is to the reference: in BF16 units, value by value, as an angle, and, where a
device adds with fewer bits, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIN_NEAR_SHARE = 0.999  # of all values must be at most one unit away
MAX_COSINE_DISTANCE = 1e-5
# Hopper's FP8 sums are off by 5e-4 of their size, measured at K up to 7168. That moves gate and up
# to neighbouring BF16 numbers, and those Linear1's output to neighbouring E4M3 numbers: most tokens
# are off by 1 % or less, where E4M3 itself costs 3 %. A token that few values of Linear1's output
# rule moves with them, by the distance of E4M3 numbers, up to 1/8: 6 % was the most seen. One that
# misses an expert is off by more.
MAX_MEDIAN_TOKEN_ERROR = 0.02
MAX_TOKEN_ERROR = 1 / 8
FP32_SUM_BITS = 24


@dataclass(frozen=True)
class Comparison:
    """One rank's output against the reference.

    A unit is the distance between neighbouring BF16 numbers. NaN is infinitely far from everything,
    itself included: the layer makes none of valid inputs.
    """

    num_values: int
    num_equal: int
    num_near: int  # at most one unit away, the equal ones included
    max_units: float
    cosine_distance: float
    num_tokens: int
    num_close_tokens: int  # whose error is below MAX_MEDIAN_TOKEN_ERROR
    max_token_error: float  # length of a token's error, relative to the token

    @property
    def is_exact(self) -> bool:
        """Equal bit for bit."""
        return self.num_equal == self.num_values

    @property
    def is_near(self) -> bool:
        """As near as another order of FP32 additions explains."""
        return self.has_near_values and self.cosine_distance < MAX_COSINE_DISTANCE

    @property
    def has_near_values(self) -> bool:
        return self.num_near >= MIN_NEAR_SHARE * self.num_values

    def is_good(self, *, exact: bool, sum_bits: int = FP32_SUM_BITS) -> bool:
        """exact: equality is what can be expected. sum_bits: of `Numerics`; where sums are shorter
        than FP32, values differ by more than a unit here and there, and the tokens' errors must
        do."""
        if exact:
            return self.is_exact
        if sum_bits >= FP32_SUM_BITS:
            return self.is_near
        return judge([self], exact=False, sum_bits=sum_bits) == [True]


def judge(
    comparisons: Sequence[Comparison], *, exact: bool, sum_bits: int = FP32_SUM_BITS
) -> list[bool]:
    """Which ranks' outputs of one call are good.

    Once in a million values the last bit of the SiLU decides to which E4M3 number Linear1's output
    is rounded, and about one in 200 values of that token's row moves by more than a unit. A rank of
    a few tokens cannot absorb that, so the share of near values is also taken over all ranks; the
    angle must be right on each. Likewise with short sums, which move many values a little and a
    token here and there by more: half of all ranks' tokens must be close, and none far off.
    """
    if exact:
        return [comparison.is_exact for comparison in comparisons]
    if sum_bits < FP32_SUM_BITS:
        num_tokens = sum(comparison.num_tokens for comparison in comparisons)
        num_close = sum(comparison.num_close_tokens for comparison in comparisons)
        half_are_close = 2 * num_close >= num_tokens
        return [
            half_are_close and comparison.max_token_error < MAX_TOKEN_ERROR
            for comparison in comparisons
        ]
    num_values = sum(comparison.num_values for comparison in comparisons)
    num_near = sum(comparison.num_near for comparison in comparisons)
    all_near = num_near >= MIN_NEAR_SHARE * num_values
    return [
        (all_near or comparison.has_near_values)
        and comparison.cosine_distance < MAX_COSINE_DISTANCE
        for comparison in comparisons
    ]


def compare(y: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare two BF16 tensors of one shape, [tokens, hidden] or of one token.

    >>> compare(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)).is_exact
    True
    """
    for name, tensor in (("y", y), ("expected", expected)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16; got {tensor.dtype}")
    if y.shape != expected.shape:
        raise ValueError(
            f"y must have expected's shape {list(expected.shape)}; got {list(y.shape)}"
        )
    y, expected = y.detach().cpu(), expected.detach().cpu()
    exact_y, exact_expected = y.double(), expected.double()
    token_errors = _token_errors(exact_y, exact_expected)
    units = (_rank_among_numbers(y) - _rank_among_numbers(expected)).abs().double()
    units[y.isnan() | expected.isnan()] = torch.inf
    return Comparison(
        num_values=y.numel(),
        num_equal=int((units == 0).sum()),
        num_near=int((units <= 1).sum()),
        max_units=float(units.max()) if y.numel() else 0.0,
        cosine_distance=cosine_distance(exact_y.flatten(), exact_expected.flatten()),
        num_tokens=token_errors.numel(),
        num_close_tokens=int((token_errors < MAX_MEDIAN_TOKEN_ERROR).sum()),
        max_token_error=float(token_errors.max()) if token_errors.numel() else 0.0,
    )


def _token_errors(y: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row; infinite where something should be zero, or is NaN."""
    errors = (y - expected).norm(dim=-1)
    relative = torch.where(errors == 0, 0.0, errors / expected.norm(dim=-1))
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf).flatten()


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
