"""Plants bugs into copies of the training kernels' headers; each has to be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deep_moe.activations import GeluTanh, Situ, Swiglu, SwigluStep
from deep_moe.training import launching

from ..training import test_kernels
from .catalogue import Mutation
from .planting import check_edits, noticed_in, planted_in_headers
from .training_catalogue import TRAINING_MUTATIONS


def name_of(mutation: Mutation) -> str:
    return mutation.name


def outcome() -> str:
    """Who noticed something in tests of each kernel."""

    def run() -> bool:
        try:
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
            for by_columns in (False, True):
                test_kernels.test_quantized_weights_are_bit_equal(by_columns)
        except AssertionError:
            return False
        return True

    return noticed_in(run)


@pytest.mark.parametrize("mutation", TRAINING_MUTATIONS, ids=name_of)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    check_edits(mutation)


def test_names_are_given_once() -> None:
    assert max(Counter(map(name_of, TRAINING_MUTATIONS)).values()) == 1


def test_without_a_bug_nobody_complains() -> None:
    assert outcome() == ""


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    mutation: Mutation = request.param
    with planted_in_headers(mutation, tmp_path, monkeypatch, launching.compiled):
        yield mutation


@pytest.mark.slow
@pytest.mark.parametrize("planted", TRAINING_MUTATIONS, ids=name_of, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    assert outcome() in planted.catcher.split("|")
