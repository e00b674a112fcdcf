"""A run of any kernel on a chip's clock, as a page shows it."""

from __future__ import annotations

import numpy as np
import pytest

from deep_moe.emulator import Machine, chips
from deep_moe.traces.machine import machine_timeline
from deep_moe.traces.page import page

from ..emulator.raw_ptx import entry
from .test_page import decoded

BODY = """
ld.global.u64 %rd0, [%p0];
add.u64 %rd1, %rd0, 1;
bar.sync 0;
nanosleep.u32 1000;
st.global.u64 [%p0], %rd1;
"""


@pytest.fixture
def machine() -> Machine:
    """Two CTAs of two warps each, which load, meet and sleep."""
    machine = Machine(clock="h100", keep_waits=True, checks=False)  # both store the same
    array = np.zeros(64, np.uint64)
    machine.add_array(array, "array")
    loaded = machine.load(entry(BODY, 1), name="test.ptx")
    args = [array.ctypes.data.to_bytes(8, "little")]
    machine.launch(loaded, grid=(2, 1, 1), block=(64, 1, 1), args=args)
    machine.run()
    return machine


def test_every_wait_of_every_warp_is_there(machine: Machine):
    timeline = machine_timeline(machine)
    assert [(lane.cta, lane.role) for lane in timeline.lanes] == [
        (cta, f"warp {warp}") for cta in (0, 1) for warp in (0, 1)
    ]
    waits = timeline.spans[timeline.spans["step"] != timeline.steps.index("instructions")]
    assert len(waits) == len(machine.waits)
    for kind in ("memory", "sleep"):
        own = waits[waits["step"] == timeline.steps.index(kind)]
        spent = (own["end_ns"] - own["start_ns"]).sum()
        expected = [wait.end_ns - wait.start_ns for wait in machine.waits if wait.kind == kind]
        assert spent == pytest.approx(sum(expected))
        assert len(own) == 4
    for lane in range(4):
        own = timeline.spans[timeline.spans["lane"] == lane]
        assert own["start_ns"][1:] == pytest.approx(own["end_ns"][:-1])  # it waits or works


def test_its_page_has_the_use_of_memory(machine: Machine):
    header, columns, _ = decoded(page(machine_timeline(machine), title="a kernel"))
    assert "memory" in {one["name"] for one in header["series"]}
    most = next(one["most"] for one in header["series"] if one["name"] == "memory")
    assert most == chips.load("h100").value("hbm_gb_per_s")
    assert header["facts"] == {"chip": "h100"}
    awaited = {step["name"]: step["awaited"] for step in header["steps"]}
    assert awaited["memory"] == "the results of loads"
    assert not awaited["instructions"]
    assert len(columns["step"]) > 8


def test_without_waits_there_is_nothing_to_show():
    for machine in (Machine(), Machine(clock="h100", keep_waits=True)):
        with pytest.raises(ValueError, match="must have a chip as clock and keep_waits=True"):
            machine_timeline(machine)
