"""The measure by which results are judged."""

import math

import pytest
import torch

from deep_moe.trial.bounds import Bounds
from deep_moe.trial.comparison import compare


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_equal_tensors_are_exact():
    y = bf16(1, -2, 0, 3e38)
    assert compare(y, y.clone()).is_exact


def test_both_zeros_are_equal():
    assert compare(bf16(0.0, 1), bf16(-0.0, 1)).is_exact


def test_neighbours_are_one_unit_apart_across_a_power_of_two():
    below_two = 2 - 2**-7
    comparison = compare(bf16(below_two, -below_two), bf16(2, -2))
    assert (comparison.num_equal, comparison.num_near, comparison.max_units) == (0, 2, 1)


def test_neighbours_on_both_sides_of_zero_are_two_units_apart():
    tiny = 2.0**-133
    assert compare(bf16(tiny), bf16(-tiny)).max_units == 2


def test_nan_is_far_from_nan_and_right_where_it_is_expected():
    comparison = compare(bf16(math.nan, 1), bf16(math.nan, 1))
    assert (comparison.num_near, comparison.num_wrong) == (1, 0)
    assert not comparison.is_exact
    assert comparison.is_right
    assert not compare(bf16(math.nan, 1), bf16(1, 1)).is_right
    assert not compare(bf16(1, 1), bf16(math.nan, 1)).is_right


def test_beside_a_tensor_all_that_is_not_equal_is_wrong():
    comparison = compare(bf16(1, 2 - 2**-7, 3), bf16(1, 2, 3))
    assert (comparison.num_wrong, comparison.num_wrong_tokens) == (1, 1)


def bounds(*ends: tuple[float, float], max_token_error: float) -> Bounds:
    low, high = torch.tensor(ends, dtype=torch.float32).T
    y = ((low + high) / 2).bfloat16()
    error = torch.tensor([max_token_error], dtype=torch.float64)
    return Bounds(y[None], low[None], high[None], error)


def test_values_have_to_be_in_their_intervals():
    expected = bounds((1, 3), (4, 4), (-2, 2), max_token_error=10)
    assert compare(bf16(1, 4, 2)[None], expected).is_right
    wrong = compare(bf16(1, 4 + 2**-5, -2.015625)[None], expected)
    assert (wrong.num_wrong, wrong.num_wrong_tokens, wrong.num_tokens) == (2, 1, 1)
    assert not compare(bf16(math.nan, 4, 0)[None], expected).is_right


def test_values_cannot_all_be_at_the_ends_of_their_intervals():
    expected = bounds(*[(0, 2)] * 100, max_token_error=5)
    y = torch.ones(1, 100, dtype=torch.bfloat16)
    y[0, :24] = 2
    assert compare(y, expected).is_right
    y[0, :26] = 0
    comparison = compare(y, expected)
    assert (comparison.num_wrong, comparison.num_wrong_tokens) == (0, 1)
    assert not comparison.is_right


def test_all_zeros_against_something_is_far():
    assert compare(torch.zeros(4, dtype=torch.bfloat16), bf16(1, 1, 1, 1)).cosine_distance == 1


def test_no_values_are_equal():
    empty = torch.empty(0, 128, dtype=torch.bfloat16)
    comparison = compare(empty, empty)
    assert comparison.is_exact
    assert comparison.is_right


def test_shapes_and_types_are_checked():
    with pytest.raises(ValueError, match=r"expected's shape \[2\]; got \[3\]"):
        compare(bf16(1, 2, 3), bf16(1, 2))
    with pytest.raises(TypeError, match="y must be bfloat16"):
        compare(torch.ones(2), bf16(1, 2))
