"""Plants bugs into copies of the headers of `grouped_product`; each has to be noticed."""

# ruff: noqa: E501 (code of the headers)

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_moe.training import launching

from ..training import test_grouped_product
from .catalogue import Mutation, removed, replaced
from .planting import check_edits, noticed_in, planted_in_headers

M = Mutation
PRODUCT_MUTATIONS = (
    M("rows_of_the_next_expert", replaced("rows_of_own_expert", "begin + args_.rows_per_expert", "num_rows"), "race|result"),
    M("rows_behind_all", replaced("rows_bounded", "min(end, limit)", "end"), "misuse|result|race"),
    M("stage_freed_by_half", replaced("product_empty_init", "Config::num_math_warps", "Config::num_math_warps / 2"), "race|misuse|result"),
    M("multiplied_before_loaded", removed("product_stage_awaited"), "race|misuse|result"),
    M("loaded_before_free", removed("product_stage_free"), "race|misuse|result"),
    M("weight_of_first_expert", replaced("weight_of_expert", "tile.expert", "0"), "result"),
    M("scale_of_first_block", replaced("weight_scale_of_block", "weight_sf[k_block]", "weight_sf[0]"), "result"),
    M("added_before_complete", removed("product_complete"), "race|misuse"),
    M("scale_of_the_other_row", replaced("product_promoted", "i / 2 % 2 == 0", "i / 2 % 2 == 1"), "result"),
    M("registers_not_fenced", removed("product_fence"), "race|misuse"),
    M("rows_of_the_next_expert_stored", replaced("product_stored", "own_row < tile.end_row", "true"), "result|misuse|race"),
    M("columns_of_the_next_row_stored", replaced("product_stored", "column < args_.num_columns", "true"), "result|misuse|race"),
    M("barriers_used_before_made", removed("product_set_up"), "race|misuse"),
)  # fmt: skip


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
