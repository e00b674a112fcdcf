"""What the emulator computes on another processor, against what it computed on this one.

`make test-aarch64` runs these with the other processor's Python. They need the file that
`tests.aarch64.layers` wrote.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from .layers import CASES, IN_PROCESSES, results_of, results_of_processes

RECORD = os.environ.get("DEEP_MOE_OTHER_PROCESSOR", "")
pytestmark = [
    pytest.mark.skipif(not RECORD, reason="make test-aarch64 runs these"),
    pytest.mark.timeout(1800),
]


@cache
def record() -> dict[tuple[str, str], dict[str, Any]]:
    return torch.load(Path(RECORD), weights_only=False)


def test_the_processor_is_another_one():
    assert platform.machine() == "aarch64"


@pytest.mark.parametrize(("arch", "pair"), CASES)
def test_a_layer_has_the_same_bits(arch, pair):
    operands = record()[arch, pair]
    results = results_of(arch, pair, operands)
    assert all(y.abs().max() > 0 for y in results if len(y))
    check_same_bits(results, operands["y"])


def test_ranks_in_processes_have_the_same_bits():
    operands = record()[IN_PROCESSES]
    check_same_bits(results_of_processes(*IN_PROCESSES, operands), operands["y"])


def check_same_bits(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for rank, (y, other) in enumerate(zip(results, expected, strict=True)):
        different = (y.view(torch.int16) != other.view(torch.int16)).sum()
        assert not different, f"rank {rank}: {different} of {y.numel()} values differ"


def test_no_kernel_was_compiled_here():
    """The key of a kernel holds nothing of the processor that compiled it."""
    from deep_moe.jit.cache import KernelCache

    kernels = {entry.key for entry in KernelCache().entries()}
    assert kernels == set(os.environ["DEEP_MOE_OTHER_KERNELS"].split())
