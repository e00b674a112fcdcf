"""Which layers share a buffer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.activations import Swiglu
from deep_moe.integrations import shared_buffers, shared_steps
from deep_moe.integrations.shared_buffers import LayerSizes, SharedBuffers
from deep_moe.integrations.shared_steps import SharedSteps

SIZES = LayerSizes(8, 2, 256, 128, "mxfp4", "mxfp8")


def test_layers_of_the_same_sizes_share_one_on_each_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a model has that is spread over the GPUs of one process."""
    made: list[torch.device] = []

    def make(*_: Any, device: torch.device, **options: Any) -> SimpleNamespace:
        made.append(device)
        return SimpleNamespace(shape=SimpleNamespace(num_max_tokens_per_rank=32), device=device)

    monkeypatch.setattr(shared_buffers, "get_symm_buffer_for_mega_moe", make)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    buffers = SharedBuffers()
    first, second, current = (torch.device(name) for name in ("cuda:0", "cuda:1", "cuda"))
    found = [buffers.buffer(None, device, SIZES, 5) for device in (first, second, current, first)]
    assert [buffer.device for buffer in found] == [first, second, second, first]
    assert made == [first, second]
    assert buffers.buffer(None, first, SIZES._replace(hidden=384), 5) is not found[0]


def test_the_same_is_true_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def make(*_: Any, device: torch.device, **options: Any) -> SimpleNamespace:
        made.append(device)
        return SimpleNamespace(token_format="mxfp8")

    for name in ("GroupedExperts", "LowLatencyAllToAll"):
        monkeypatch.setattr(shared_steps, name, make)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    steps = SharedSteps()
    first, second, current = (torch.device(name) for name in ("cuda:0", "cuda:1", "cuda"))
    found = [
        steps.steps(None, device, SIZES, Swiglu(), 8, "sm_90a")
        for device in (first, second, current, first)
    ]
    assert found[3] is found[0]
    assert found[2] is found[1]
    assert made == [first, first, second, second]


@pytest.mark.parametrize("kind", ["buffers", "steps"])
def test_an_engine_that_starts_again_gets_new_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new group has the name of the one that was destroyed."""
    made: list[Any] = []

    def make(*_: Any, **options: Any) -> SimpleNamespace:
        one = SimpleNamespace(
            shape=SimpleNamespace(num_max_tokens_per_rank=32), token_format="mxfp8", is_closed=False
        )
        one.close = lambda: setattr(one, "is_closed", True)
        made.append(one)
        return one

    monkeypatch.setattr(shared_buffers, "get_symm_buffer_for_mega_moe", make)
    for name in ("GroupedExperts", "LowLatencyAllToAll"):
        monkeypatch.setattr(shared_steps, name, make)
    cpu, buffers, steps = torch.device("cpu"), SharedBuffers(), SharedSteps()
    names, found = [], []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            group = dist.group.WORLD
            assert group is not None
            names.append(group.group_name)
            for _ in range(2):
                if kind == "buffers":
                    found.append(buffers.buffer(group, cpu, SIZES, 5))
                else:
                    found.append(steps.steps(group, cpu, SIZES, Swiglu(), 8, "sm_90a"))
        finally:
            dist.destroy_process_group()
    assert names[0] == names[1]
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[2] is not found[0]
    assert [one.is_closed for one in made] == [i < len(made) // 2 for i in range(len(made))]


# The first exit handler runs last. A thread names itself a moment after it has begun, and is listed
# for a moment after its end: hence the waits.
SERVED_AND_ENDED = """
import atexit
import time
from contextlib import suppress
from pathlib import Path

def count_group_threads():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            count += "gloo" in Path(task, "comm").read_text()
    return count

def print_whether_a_group_has_threads(expected):
    for _ in range(200):
        if bool(count_group_threads()) == expected:
            break
        time.sleep(0.05)
    print(bool(count_group_threads()))

atexit.register(print_whether_a_group_has_threads, False)
import torch
import torch.distributed as dist
from deep_moe.integrations.served_experts import buffers
from deep_moe.integrations.shared_buffers import LayerSizes
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print_whether_a_group_has_threads(True)
sizes = LayerSizes(8, 2, 256, 128, "mxfp4", "mxfp8")
buffers.buffer(dist.group.WORLD, torch.device("cpu"), sizes, 5)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads here")
def test_nothing_holds_a_group_when_python_ends() -> None:
    """Its threads would be stopped where they are, which can abort the process."""
    ran = subprocess.run(
        [sys.executable, "-c", SERVED_AND_ENDED], check=True, capture_output=True, text=True
    )
    assert ran.stdout.split() == ["True", "False"]  # in the group, at the end
