"""Plants bugs into what grouped experts do not share with the fused call; each is to be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_moe.trial.comparison import compare
from deep_moe.trial.grouped_calls import COUNTS, exact_case, run_behind_each_other, run_padded

from .catalogue import Mutation
from .grouped_catalogue import GROUPED_MUTATIONS
from .planting import check_edits, noticed_in, noticed_in_test, planted_in_headers


def name_of(mutation: Mutation) -> str:
    return mutation.name


def outcome() -> str:
    """Who noticed something in three calls of one object."""

    def run() -> bool:
        case = exact_case("sm_100a")
        with case.experts(timeout_s=0.01) as experts:
            # No call may count on zeros in the pools.
            work_space = experts._work_space
            work_space.memory.tensor[work_space.layout.mark("control_bytes") :] = 0xFF
            ys = [
                run_behind_each_other(case, own=experts),
                run_padded(case, own=experts),
                run_behind_each_other(exact_case("sm_100a", COUNTS[::-1]), own=experts),
            ]
        expected = [case.exact(), case.exact(), exact_case("sm_100a", COUNTS[::-1]).exact()]
        return all(compare(y, own).is_exact for y, own in zip(ys, expected, strict=True))

    return noticed_in(run)


@pytest.mark.parametrize("mutation", GROUPED_MUTATIONS, ids=name_of)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    check_edits(mutation)


def test_without_a_bug_nobody_complains() -> None:
    assert outcome() == ""


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    mutation: Mutation = request.param
    with planted_in_headers(mutation, tmp_path, monkeypatch):
        yield mutation


@pytest.mark.slow
@pytest.mark.parametrize("planted", GROUPED_MUTATIONS, ids=name_of, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    noticed = noticed_in_test("split", planted) if planted.test else outcome()
    assert noticed in planted.catcher.split("|")
