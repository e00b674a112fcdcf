"""Threads that stand for ranks: what each gets where they meet, and that none waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from deep_moe.trial.rank_threads import RankThreads


def test_each_gets_its_part_of_what_all_brought() -> None:
    threads = RankThreads(4)

    def work(rank: int) -> tuple[int, int]:
        own = threads.meet(rank, rank, lambda values: [10 * value for value in values])
        first = rank - rank % 2
        pair = threads.meet(rank, own, lambda values: [sum(values)] * 2, (first, first + 1))
        return own, pair

    assert threads.run(work) == [(0, 10), (10, 10), (20, 50), (30, 50)]


def ends_early(threads: RankThreads, rank: int) -> None:
    if rank != 1:
        threads.meet(rank, None, lambda values: values)


def waits_elsewhere(threads: RankThreads, rank: int) -> None:
    threads.meet(rank, None, lambda values: values, (0, 1, 2) if rank else (0, 1))


@pytest.mark.parametrize("work", [ends_early, waits_elsewhere])
def test_who_is_waited_for_and_does_not_come_ends_all(work: Any) -> None:
    threads = RankThreads(3)
    with pytest.raises(RuntimeError, match=r"rank \d waits for ranks that do not come"):
        threads.run(lambda rank: work(threads, rank))


def fails_alone(threads: RankThreads, rank: int) -> None:
    if rank == 1:
        raise ValueError("one went wrong")
    threads.meet(rank, None, lambda values: values)


def fails_together(threads: RankThreads, rank: int) -> None:
    def fail(values: list[None]) -> list[None]:
        raise ValueError("one went wrong")

    threads.meet(rank, None, fail)


@pytest.mark.parametrize("work", [fails_alone, fails_together])
def test_the_first_cause_is_raised(work: Any) -> None:
    threads = RankThreads(3)
    with pytest.raises(ValueError, match="one went wrong"):
        threads.run(lambda rank: work(threads, rank))
