"""The measure by which results are judged."""

import math

import pytest
import torch

from deep_moe.comparison import Comparison, compare, judge


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


def test_nan_is_far_from_nan():
    comparison = compare(bf16(math.nan), bf16(math.nan))
    assert comparison.num_near == 0
    assert not comparison.is_near


def test_one_value_in_a_thousand_may_be_further_off():
    expected = torch.ones(2000, dtype=torch.bfloat16)
    y = expected.clone()
    y[:2] = 1 + 2**-6
    assert compare(y, expected).is_near
    y[2] = 1 + 2**-6
    assert not compare(y, expected).is_near


def test_a_wrong_row_is_seen_by_the_angle():
    expected = torch.ones(100_000, dtype=torch.bfloat16)
    y = expected.clone()
    y[:50] = -1
    assert compare(y, expected).num_near > 0.999 * y.numel()
    assert not compare(y, expected).is_near


def test_all_zeros_against_something_is_far():
    assert not compare(torch.zeros(4, dtype=torch.bfloat16), bf16(1, 1, 1, 1)).is_near


def test_no_values_are_equal():
    empty = torch.empty(0, 128, dtype=torch.bfloat16)
    comparison = compare(empty, empty)
    assert comparison.is_exact
    assert comparison.is_near


def test_shapes_and_types_are_checked():
    with pytest.raises(ValueError, match=r"expected's shape \[2\]; got \[3\]"):
        compare(bf16(1, 2, 3), bf16(1, 2))
    with pytest.raises(TypeError, match="y must be bfloat16"):
        compare(torch.ones(2), bf16(1, 2))


def of_tokens(*errors: float) -> Comparison:
    """Tokens that are off by so much."""
    torch.manual_seed(0)
    expected = torch.randn(len(errors), 5000, dtype=torch.float64)
    noise = torch.randn(len(errors), 5000, dtype=torch.float64)
    y = expected + torch.tensor(errors, dtype=torch.float64)[:, None] * noise
    return compare(y.bfloat16(), expected.bfloat16())


@pytest.mark.parametrize(
    ("error", "error_of_one", "is_good"),
    [(0.015, 0.015, True), (0.025, 0.025, False), (0.005, 0.12, True), (0.005, 0.13, False)],
)
def test_short_sums_are_judged_by_the_errors_of_tokens(error, error_of_one, is_good):
    comparison = of_tokens(*[error] * 19, error_of_one)
    assert not comparison.is_good(exact=False)
    assert comparison.is_good(exact=False, sum_bits=13) is is_good
    assert not comparison.is_good(exact=True, sum_bits=13)


@pytest.mark.parametrize("wrong", [0.0, 1.0, math.nan])
def test_a_token_that_was_left_out_has_no_small_error(wrong):
    expected = torch.ones(20, 128, dtype=torch.bfloat16)
    expected[3] = 0 if wrong else 1
    y = expected.clone()
    y[3] = wrong
    assert compare(y, expected).max_token_error >= 1
    assert not compare(y, expected).is_good(exact=False, sum_bits=13)


def one_rank(num_values: int, num_far: int, cosine_distance: float = 0.0) -> Comparison:
    near = num_values - num_far
    return Comparison(
        num_values,
        near,
        near,
        9.0 if num_far else 0.0,
        cosine_distance,
        num_tokens=1,
        num_close_tokens=1,
        max_token_error=0.0,
    )


def test_a_rank_of_few_tokens_is_judged_by_the_share_of_all_ranks():
    small, large = one_rank(5_000, 6), one_rank(400_000, 0)
    assert judge([small], exact=False) == [False]
    assert judge([small, large], exact=False) == [True, True]
    assert judge([small, large], exact=True) == [False, True]


def test_a_rank_far_off_is_not_saved_by_the_others():
    others = one_rank(10_000_000, 0)
    assert judge([one_rank(5_000, 6, cosine_distance=2e-5), others], exact=False) == [False, True]
    assert judge([one_rank(5_000, 5_000), one_rank(10_000, 0)], exact=False) == [False, True]


def test_with_short_sums_half_of_all_ranks_tokens_must_be_close():
    single, others = of_tokens(0.04), of_tokens(0.005, 0.005, 0.03)
    assert judge([single], exact=False, sum_bits=13) == [False]
    assert judge([single, others], exact=False, sum_bits=13) == [True, True]
    assert judge([single, single, others], exact=False, sum_bits=13) == [False] * 3
    assert judge([of_tokens(0.2), others, others], exact=False, sum_bits=13) == [False, True, True]
    nobody = compare(torch.empty(0, 128).bfloat16(), torch.empty(0, 128).bfloat16())
    assert judge([nobody, others], exact=False, sum_bits=13) == [True, True]
