"""Threads of this process that stand for ranks, and meet where ranks wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")
Value = TypeVar("Value")


class _Meeting:
    """values: of those who have come. results: of each, once all are there."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.results: dict[int, Any] = {}


class _NobodyComesError(RuntimeError):
    """Another rank has failed, or all that are left wait for some that do not come."""


class RankThreads:
    """A thread for each of `num_ranks` ranks. None waits for ever: if those who are awaited have
    ended or wait elsewhere, all raise."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._changed = threading.Condition()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._num_busy = num_ranks  # neither waiting nor at their end
        self._is_stuck = False

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """work(rank) of every rank. If a rank raises, its error is raised here."""
        results: dict[int, Result] = {}
        failures: list[BaseException] = []

        def take_part(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                failures.append(error)
            finally:
                with self._changed:
                    self._leave()

        threads = [
            threading.Thread(target=take_part, args=(rank,), name=f"rank {rank}")
            for rank in range(self.num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise min(failures, key=lambda error: isinstance(error, _NobodyComesError))
        return [results[rank] for rank in range(self.num_ranks)]

    def meet(
        self,
        rank: int,
        value: Value,
        together: Callable[[list[Value]], Sequence[Result]],
        members: Sequence[int] | None = None,
    ) -> Result:
        """Wait until all members have come, by default all ranks. The last one calls `together`
        with the values that they brought, in order of ranks, and each gets its part of what that
        gives. Called by the thread of `rank`, a member."""
        who = tuple(range(self.num_ranks) if members is None else members)
        with self._changed:
            meeting = self._meetings.setdefault(who, _Meeting())
            meeting.values[rank] = value
            if len(meeting.values) == len(who):
                self._changed.notify_all()
                try:
                    given = together([meeting.values[member] for member in who])
                except BaseException:
                    self._is_stuck = True
                    raise
                del self._meetings[who]
                meeting.results = dict(zip(who, given, strict=True))
                self._num_busy += len(who) - 1
            else:
                self._leave()
                self._changed.wait_for(lambda: rank in meeting.results or self._is_stuck)
                if rank not in meeting.results:
                    raise _NobodyComesError(f"rank {rank} waits for ranks that do not come")
            result: Result = meeting.results[rank]
            return result

    def _leave(self) -> None:
        self._num_busy -= 1
        if self._num_busy == 0 and self._meetings:
            self._is_stuck = True
            self._changed.notify_all()
