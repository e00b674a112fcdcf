"""Plants bugs into copies of the headers of the training kernels and of `grouped_product`; each has
to be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deep_moe.activations import GeluTanh, Situ, Swiglu, SwigluStep

from ..training import test_grouped_product, test_kernels, test_weight_gradients
from .catalogue import Mutation
from .planting import check_edits, noticed_in, planted_in_headers
from .product_catalogue import PRODUCT_MUTATIONS
from .training_catalogue import TRAINING_MUTATIONS


def name_of(mutation: Mutation) -> str:
    return mutation.name


def outcome_of(check: Callable[[], None]) -> str:
    """Who noticed something in these tests."""

    def run() -> bool:
        try:
            check()
        except AssertionError:
            return False
        return True

    return noticed_in(run)


def check_training_kernels() -> None:
    """Tests of each kernel."""
    test_kernels.test_slots_are_sorted(700, 6, 40, torch.int64)
    test_kernels.test_gathered_rows_are_bit_equal(32, rounds=False)
    test_kernels.test_gathered_rows_are_bit_equal(32, rounds=True)
    test_kernels.test_scattered_rows_are_bit_equal(3)
    test_kernels.test_what_is_added_to_rows("all")
    for activation in (
        Swiglu(clamp=0.75),
        Situ(beta=1.0, linear_beta=2.0),
        GeluTanh(),
        SwigluStep(0.5),
    ):
        test_kernels.test_activation_and_its_gradients(activation, False, True)
    test_kernels.test_activation_is_rounded_to_mxfp8()
    test_kernels.test_rounded_weights_are_bit_equal()
    test_kernels.test_quantized_rows_are_bit_equal(640)
    test_kernels.test_dequantized_rows_are_bit_equal()
    test_kernels.test_activation_is_quantized()
    for gathers in (False, True):
        test_kernels.test_quantized_columns_are_bit_equal(gathers)
    test_kernels.test_rows_and_columns_quantized_at_once_are_those_of_each()
    for by_columns in (False, True):
        test_kernels.test_quantized_weights_are_bit_equal(by_columns)
        test_kernels.test_weights_quantized_both_ways_are_those_of_each(by_columns)
        test_kernels.test_weights_are_compared_with_what_was_made_of_them(by_columns)


def check_products() -> None:
    for name in test_grouped_product.CASES:
        test_grouped_product.test_products_are_right(name)
    for name in test_weight_gradients.CASES:
        test_weight_gradients.test_sums_are_right(name)
    test_weight_gradients.test_sums_are_added("an odd m-block, and columns behind the last")


CHECKS = {check_training_kernels: TRAINING_MUTATIONS, check_products: PRODUCT_MUTATIONS}
MUTATIONS = [mutation for mutations in CHECKS.values() for mutation in mutations]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    check_edits(mutation)


def test_names_are_given_once() -> None:
    assert max(Counter(map(name_of, MUTATIONS)).values()) == 1


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_bug_nobody_complains(check: Callable[[], None]) -> None:
    assert outcome_of(check) == ""


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    mutation: Mutation = request.param
    with planted_in_headers(mutation, tmp_path, monkeypatch):
        yield mutation


@pytest.mark.slow
@pytest.mark.parametrize("planted", MUTATIONS, ids=name_of, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    (check,) = (check for check, own in CHECKS.items() if planted in own)
    assert outcome_of(check) in planted.catcher.split("|")
