"""Processes of a trial end as they should."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from deep_moe.trial import rank_processes


def use_compiler_and_group(_device: torch.device) -> None:
    torch.compiler.disable(lambda: dist.all_reduce(torch.ones(4)))()


def num_group_threads_after(rank: int, folder: str) -> None:
    group = {"init_method": f"file://{folder}/rendezvous", "rank": rank, "world_size": 1}
    rank_processes.run_in_group(use_compiler_and_group, torch.device("cpu"), (), **group)
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    Path(folder, f"rank{rank}").write_text(str(sum("gloo" in name for name in names)))


@pytest.mark.parametrize(("device_type", "method"), [("cpu", "forkserver"), ("cuda", "spawn")])
def test_how_processes_start(
    monkeypatch: pytest.MonkeyPatch, device_type: str, method: str
) -> None:
    methods: list[str] = []
    monkeypatch.setattr(
        torch.multiprocessing,
        "start_processes",
        lambda *_, start_method, **__: methods.append(start_method),
    )
    rank_processes.run_on_ranks(multiply, 2, device_type)
    assert methods == [method]


def multiply(_device: torch.device, size: int = 500) -> None:
    torch.ones(size, size) @ torch.ones(size, size)
    torch.ones(size * size).exp_()


@pytest.fixture
def _busy_threads() -> Iterator[None]:
    """This process has computed with two threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    multiply(torch.device("cpu"))
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("_busy_threads")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("start_method", [None, "fork"])
def test_ranks_do_not_wait_for_threads_of_their_parent(
    start_method: Literal["fork"] | None,
) -> None:
    """Which a fork does not have."""
    rank_processes.run_on_ranks(multiply, 2, "cpu", start_method=start_method)


def variable(_device: torch.device) -> str | None:
    return os.environ.get("DEEP_MOE_TEST")


def test_ranks_have_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("DEEP_MOE_TEST", value)
        assert rank_processes.results_of_ranks(variable, 1, "cpu") == [value]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads here")
def test_threads_of_the_group_end_with_the_group(tmp_path: Path) -> None:
    """Those that outlive the group end with the interpreter, which can abort the process."""
    # A process of its own: in this one a compiler may have been imported before there was a group.
    torch.multiprocessing.spawn(num_group_threads_after, args=(str(tmp_path),))
    assert Path(tmp_path, "rank0").read_text() == "0"
