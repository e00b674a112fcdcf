"""Runs fuzz cases, in this process or in several."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from .fuzzing import CASES_PER_KERNEL, Case

_BATCHES_AHEAD = 2  # of each worker, so that none waits for the next


@dataclass(frozen=True)
class Outcome:
    """What `run` said of a case, "" if nothing, and what it took of a processor."""

    case: Case
    failure: str
    seconds: float


def outcomes(
    cases: Iterable[Case], *, num_workers: int = 1, ends_at: float | None = None
) -> Iterator[Outcome]:
    """Of these cases, in their order. Those that share a kernel run in one worker.

    num_workers: processes; with 1, all runs here. ends_at: `time.time()` behind which no case
    begins.
    """
    batches = (
        list(batch)
        for _, batch in itertools.groupby(
            cases, key=lambda case: (type(case), case.number // CASES_PER_KERNEL)
        )
    )
    if num_workers == 1:
        # More threads only wait for each other, so small are the products.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for case in itertools.chain.from_iterable(batches):
                if _is_over(ends_at):
                    return
                yield _outcome(case)
        finally:
            torch.set_num_threads(num_threads)
        return
    # Workers are forks of a process that has imported, so that PyTorch is imported once for all.
    multiprocessing.set_forkserver_preload(["deep_moe.trial.fuzzing"])
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(num_workers, context, _begin_worker) as pool:
        try:
            yield from _outcomes_of_pool(pool, batches, num_workers, ends_at)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _outcomes_of_pool(
    pool: ProcessPoolExecutor,
    batches: Iterator[Sequence[Case]],
    num_workers: int,
    ends_at: float | None,
) -> Iterator[Outcome]:
    running: deque[tuple[Sequence[Case], Future[list[Outcome]]]] = deque()
    while True:
        while len(running) < _BATCHES_AHEAD * num_workers and not _is_over(ends_at):
            batch = next(batches, None)
            if batch is None:
                break
            running.append((batch, pool.submit(_run_batch, batch, ends_at)))
        if not running:
            return
        batch, future = running.popleft()
        try:
            yield from future.result()
        except BrokenProcessPool:
            # Which of the cases in work it was, is not known.
            in_work = [case for cases, _ in ((batch, None), *running) for case in cases]
            numbers = ", ".join(str(case.number) for case in in_work)
            yield Outcome(batch[0], f"a worker's process ended while cases {numbers} ran", 0.0)
            return


def _begin_worker() -> None:
    """In a worker: one thread for products, and an end with the process that began it, however that
    ends."""
    torch.set_num_threads(1)
    beginner = multiprocessing.parent_process()
    assert beginner is not None

    def end_with_it() -> None:
        multiprocessing.connection.wait([beginner.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()


def _run_batch(batch: Sequence[Case], ends_at: float | None) -> list[Outcome]:
    """In a worker: those that began in time."""
    done = []
    for case in batch:
        if _is_over(ends_at):
            break
        done.append(_outcome(case))
    return done


def _outcome(case: Case) -> Outcome:
    """A case that raises has failed: what its calls may raise, `run` knows."""
    begin = sum(os.times()[:4])  # of this process and of those that it has waited for
    try:
        failure = case.run()
    except Exception:
        failure = traceback.format_exc()
    return Outcome(case, failure, sum(os.times()[:4]) - begin)


def _is_over(ends_at: float | None) -> bool:
    return ends_at is not None and time.time() >= ends_at
