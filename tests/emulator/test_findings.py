"""A run that does not stop at what the checks find: what it lists; its results are the same."""

from __future__ import annotations

import numpy as np
import pytest

from deep_moe.emulator import Machine, RaceDetected, Uninitialized

from .device import ptx_of

# Two warps write the same words, at eight instructions that share a line, and read shared memory
# that nobody wrote.
SOURCE = """
KERNEL()(u32* data) {
    u32* words = (u32*)dynamic_shared;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        data[i] = i;
    data[8 + threadIdx.x] = words[threadIdx.x];
}
"""


def run(**options: bool) -> tuple[Machine, np.ndarray]:
    data = np.zeros(128, np.uint32)
    machine = Machine(**options)
    machine.add_memory(0, data.ctypes.data, data.nbytes, "data")
    module = machine.load(ptx_of(SOURCE, "sm_100a"))
    for _ in range(2):
        machine.launch(
            module,
            "kernel",
            grid=(1, 1, 1),
            block=(64, 1, 1),
            shared_bytes=1024,
            args=[data.ctypes.data.to_bytes(8, "little")],
        )
        machine.run()
    return machine, data


def test_findings_are_collected_once_per_source_line():
    machine, data = run(stop_at_findings=False)
    race, uninitialized = sorted(machine.findings, key=lambda f: type(f).__name__)
    assert isinstance(race, RaceDetected)
    assert "nothing orders them" in str(race)
    assert str(race).count("st.global") == 3  # the first one, the other, and where the run was
    assert isinstance(uninitialized, Uninitialized)
    assert "was never written" in str(uninitialized)
    assert "ld.shared" in str(uninitialized)
    assert (data[:8] == np.arange(8)).all()


def test_the_first_finding_ends_a_run_by_default():
    with pytest.raises((RaceDetected, Uninitialized)):
        run()


def test_without_checks_nothing_is_found():
    machine, _ = run(checks=False, stop_at_findings=False)
    assert machine.findings == []
