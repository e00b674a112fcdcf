"""What is said of a GPU when calls first run on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from deep_moe.fused import gpu
from deep_moe.targets import TARGETS


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Two GPUs whose target each test names."""
    properties = SimpleNamespace(name="a GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu.gpu_of.cache_clear()
    gpu._say_that_nobody_has_run.cache_clear()
    yield monkeypatch
    gpu.gpu_of.cache_clear()
    gpu._say_that_nobody_has_run.cache_clear()


@pytest.mark.parametrize("name", TARGETS)
def test_one_line_says_that_nobody_has_run_a_kernel(name, on_a_gpu, caplog):
    target = TARGETS[name]
    on_a_gpu.setattr(gpu, "target_of_device", lambda device: target)
    with caplog.at_level(logging.WARNING):
        for index in (0, 1, 0):
            found = gpu.gpu_of(torch.device("cuda", index))
            assert found is not None
            assert found.target is target
    expected = [
        f"the kernels for {name} ({target.gpus}) have run in the emulator only; nobody has run "
        "them on such a GPU yet"
    ]
    assert caplog.messages == ([] if name == "sm_90a" else expected)
