"""Which layers share a buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
