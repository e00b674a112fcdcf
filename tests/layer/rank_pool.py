"""Processes that play the ranks, kept from test to test: starting one takes seconds.

    pool = RankPool(4, Place.GPUS)
    answers = pool.run(work, shape)     # work(rank, shape) on all four

A pool's ranks always act together. Those of a smaller group would exchange their GPU memory without
the others, and up to PyTorch 2.11 (pytorch/pytorch#196082) the next exchange among all then waits
for ever: a process counts its exchanges, not those of the group.

`work` is a function at the top of a module, and what it takes and returns can be pickled. If a rank
raises, hangs or dies, all processes are ended and started anew for the next run: after that nobody
knows what state they are in.
"""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.fused.peers import gather_objects
from deep_moe.targets import target_of_device

# After the first rank has failed, the others have this long to fail as well: theirs may be the
# more telling error.
GRACE_S = 10.0
START_S = 600.0  # of a busy machine
MAX_RANKS = 8


class RankFailedError(AssertionError):
    """A rank raised something that its test did not expect, or never answered."""


class Place(enum.Enum):
    """Where ranks run."""

    CPU = "emulated"
    GPUS = "gpus"  # one each
    SHARED_GPUS = "shared_gpus"  # any number on each GPU; their kernels take turns there

    @property
    def is_gpu(self) -> bool:
        return self is not Place.CPU


@dataclass(frozen=True)
class Rank:
    """What a rank's function is told about itself."""

    idx: int
    num_ranks: int
    group: Any  # torch.distributed process group of all ranks, or None for one rank
    device: torch.device

    @property
    def is_last(self) -> bool:
        return self.idx == self.num_ranks - 1

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def arch(self) -> str:
        """Of the kernel that the rank runs; emulated ranks stand for Hopper's."""
        return target_of_device(self.device).name if self.is_gpu else "sm_90a"

    def barrier(self) -> None:
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def synchronize(self) -> None:
        """Wait for everything launched on the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


class RankPool:
    """`size` processes at `place`."""

    def __init__(self, size: int, place: Place) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1; got {size}")
        if place is Place.GPUS and torch.cuda.device_count() < size:
            raise ValueError(f"{size} ranks need a GPU each; there are {torch.cuda.device_count()}")
        self.size = size
        self.place = place
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._rendezvous: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, work: Callable[..., Any], *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """What work(rank, *args) returned on each rank.

        timeout_s: for all of it; by default 120 on GPUs, and 600 in the emulator, whose CPUs may be
        busy. RankFailedError holds the tracebacks of all ranks that failed.
        """
        if timeout_s is None:
            timeout_s = 120.0 if self.place.is_gpu else 600.0
        if not all(process.is_alive() for process in self._processes):
            self._kill()
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((work, args))
            answers, failures = self._collect(timeout_s)
            if failures:
                raise RankFailedError(
                    "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
                )
        except BaseException:
            self._kill()
            raise
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes. The next run starts new ones."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._rendezvous is not None:
            self._rendezvous.cleanup()
            self._rendezvous = None

    def _start(self) -> None:
        # spawn: CUDA cannot be used in a forked process once its parent has used it.
        context = multiprocessing.get_context("spawn")
        # As long as there are processes, for groups that they make later meet there, too.
        self._rendezvous = tempfile.TemporaryDirectory(prefix="deep_moe_ranks_")
        folder = self._rendezvous.name
        for rank_idx in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank_idx, self.size, self.place, folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        _, failures = self._collect(START_S)
        if failures:
            self._kill()
            raise RankFailedError(f"ranks did not start: {failures}")

    def _collect(self, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        """The ranks' values and failures."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    failures[rank] = "no answer"
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    value, error = pipe.recv()
                except (EOFError, OSError):
                    value, error = None, "its process died"
                if error is None:
                    answers[rank] = value
                else:
                    failures[rank] = error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers, failures


def _join_group(rank_idx: int, size: int, place: Place, folder: str) -> torch.device:
    """Makes this process a rank of a group of all, and picks its device."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if place.is_gpu:
        device = torch.device("cuda", rank_idx % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if place is Place.SHARED_GPUS:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group(
        "nccl" if place is Place.GPUS else "gloo",  # NCCL wants a GPU for each rank
        init_method=f"file://{folder}/rendezvous",
        rank=rank_idx,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    return device


def _serve(rank_idx: int, size: int, place: Place, folder: str, pipe: Connection) -> None:
    """A process of the pool: runs what it is sent until it is sent None."""
    device = _join_group(rank_idx, size, place, folder)
    rank = Rank(rank_idx, size, dist.group.WORLD if size > 1 else None, device)
    pipe.send((None, None))
    while (task := pipe.recv()) is not None:
        work, args = task
        value, error = None, None
        try:
            value = work(rank, *args)
        except BaseException:
            error = traceback.format_exc()
        pipe.send((value, error))
    # Not destroy_process_group: with NCCL it waits for ranks, which may have died.
    os._exit(0)
