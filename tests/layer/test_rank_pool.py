"""The processes that the tests of several ranks run in."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from tests.layer.rank_pool import Place, Rank, RankFailedError, RankPool


def index_and_sum(rank: Rank, value: int) -> tuple[int, int]:
    return rank.idx, sum(rank.gather(value * (rank.idx + 1)))


def fail_on_last(rank: Rank, how: str) -> None:
    if rank.is_last and how == "raises":
        raise ZeroDivisionError("of the last rank")
    if rank.is_last and how == "dies":
        os._exit(3)
    if how == "hangs":
        time.sleep(3600)  # longer than any test may take


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2, Place.CPU)
    yield pool
    pool.close()


def test_ranks_talk(pool: RankPool) -> None:
    assert pool.run(index_and_sum, 10) == [(0, 30), (1, 30)]
    assert pool.run(index_and_sum, 20) == [(0, 60), (1, 60)]


def test_a_single_rank_has_no_group_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alone = RankPool(1, Place.CPU)
    assert alone.run(index_and_sum, 10) == [(0, 10)]
    assert list(tmp_path.iterdir())
    alone.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "rank 1: .*of the last rank"), ("dies", "rank 1: its process died")],
)
def test_a_failure_names_its_rank_and_the_next_run_works(
    pool: RankPool, how: str, message: str
) -> None:
    with pytest.raises(RankFailedError, match=f"(?s){message}"):
        pool.run(fail_on_last, how)
    assert pool.run(index_and_sum, 1) == [(0, 3), (1, 3)]


def test_a_rank_that_hangs_is_ended(pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0: no answer\nrank 1: no answer"):
        pool.run(fail_on_last, "hangs", timeout_s=1.0)


def test_a_pool_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 1; got 0"):
        RankPool(0, Place.CPU)
