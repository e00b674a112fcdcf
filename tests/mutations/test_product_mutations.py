"""Plants bugs into copies of the headers of `grouped_product`; each has to be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_moe.training import launching

from ..training import test_grouped_product
from .catalogue import Mutation
from .planting import check_edits, noticed_in, planted_in_headers
from .product_catalogue import PRODUCT_MUTATIONS


def name_of(mutation: Mutation) -> str:
    return mutation.name


def outcome() -> str:
    def run() -> bool:
        try:
            for name in test_grouped_product.CASES:
                test_grouped_product.test_products_are_right(name)
        except AssertionError:
            return False
        return True

    return noticed_in(run)


@pytest.mark.parametrize("mutation", PRODUCT_MUTATIONS, ids=name_of)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    check_edits(mutation)


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    mutation: Mutation = request.param
    with planted_in_headers(mutation, tmp_path, monkeypatch, launching.compiled):
        yield mutation


@pytest.mark.slow
@pytest.mark.parametrize("planted", PRODUCT_MUTATIONS, ids=name_of, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    assert outcome() in planted.catcher.split("|")
