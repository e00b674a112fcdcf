"""A run that does not stop at what the checks find: what it lists; its results are the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from warpcheck import EmulatorError, LaunchError, Machine, RaceDetected, Uninitialized
from warpcheck.cuda.causes import group_findings

from .device import PRELUDE, ptx_of
from .raw_ptx import run_body

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
            roles={"left": [0], "right": [1]},
        )
        machine.run()
    return machine, data


def test_findings_are_collected_once_per_source_line():
    machine, data = run(stop_at_findings=False)
    race, uninitialized = sorted(machine.findings, key=lambda f: f.kind)
    assert race.error is RaceDetected
    assert "nothing orders them" in str(race)
    assert str(race).count("st.global") == 3  # the first one, the other, and where the run was
    assert uninitialized.error is Uninitialized
    assert "was never written" in str(uninitialized)
    assert "ld.shared" in str(uninitialized)
    assert (data[:8] == np.arange(8)).all()


def test_findings_are_data():
    machine, data = run(stop_at_findings=False)
    race, uninitialized = sorted(machine.findings, key=lambda f: f.kind)
    assert (race.kind, race.space) == ("race", "global")
    assert 0 <= race.address - data.ctypes.data < 32
    first, then = race.involved
    assert (first.access, then.access) == ("write", "write")
    assert {first.warp, then.warp} == {0, 1}
    assert {first.role, then.role} == {"left", "right"}
    assert (race.role, race.file, race.line) == (then.role, then.file, then.line)
    assert race.file == "/kernel.cu"
    lines = (PRELUDE + SOURCE).splitlines()
    assert lines[race.line - 1].strip() == "data[i] = i;"
    assert then.instruction.startswith("st.global")
    assert (uninitialized.kind, uninitialized.space) == ("uninitialized", "shared")
    assert uninitialized.address >= 1024
    assert "words[threadIdx.x]" in lines[uninitialized.line - 1]
    assert str(race) == race.text
    assert json.loads(machine.findings_as_json()) == [
        json.loads(finding.to_json()) for finding in machine.findings
    ]
    assert json.loads(race.to_json())["involved"][0]["role"] == first.role


@pytest.mark.parametrize("seed", range(6))
def test_a_race_is_one_finding_whichever_access_comes_first(seed):
    source = """
KERNEL()(volatile u32* data) {
    if (threadIdx.x < 32) *(u32*)data = 1;
    else if (threadIdx.x < 64) *(u32*)data = 2;
}
"""
    machine = Machine(seed=seed, stop_at_findings=False)
    data = np.zeros(1, np.uint32)
    machine.add_array(data, "data")
    module = machine.load(ptx_of(source, "sm_100a"))
    for _ in range(8):
        machine.launch(module, grid=(1, 1, 1), block=(64, 1, 1), args=[data])
        machine.run()
    assert [finding.kind for finding in machine.findings] == ["race"]


def test_a_raised_error_has_its_finding():
    body = "mov.u64 %rd0, 64; LINE"
    for line, kind, space, address in (
        ("ld.global.u32 %r0, [%rd0];", "out_of_bounds", "global", 64),
        ("ld.shared.u32 %r0, [66];", "misaligned", "shared", 66),
        ("trap;", "trap", "", None),
    ):
        with pytest.raises(EmulatorError) as caught:
            run_body(body.replace("LINE", line))
        finding = caught.value.finding
        assert (finding.kind, finding.space, finding.address) == (kind, space, address)
        assert finding.error is type(caught.value)
        assert finding.text == str(caught.value)
        assert finding.involved[-1].instruction.endswith(line)
    with pytest.raises(LaunchError) as launch:
        run_body("", threads=2000)
    assert launch.value.finding.kind == "launch"
    assert launch.value.finding.involved == ()


def test_the_first_finding_ends_a_run_by_default():
    with pytest.raises((RaceDetected, Uninitialized)):
        run()


def test_without_checks_nothing_is_found():
    machine, _ = run(checks=False, stop_at_findings=False)
    assert machine.findings == []


STORES = """
KERNEL()(u32* data, u32 difference) {
    data[0] = 5 + (threadIdx.x / 32) * difference;
}
"""


@pytest.mark.parametrize(("difference", "severity"), [(0, "warning"), (1, "error")])
def test_writes_of_one_value_are_graver_if_it_is_not_one(difference, severity):
    machine = Machine(stop_at_findings=False)
    data = np.zeros(1, np.uint32)
    machine.add_array(data, "data")
    module = machine.load(ptx_of(STORES, "sm_90a"))
    machine.launch(module, grid=(1, 1, 1), block=(64, 1, 1), args=[data, difference])
    machine.run()
    (race,) = machine.findings
    assert (race.kind, race.same_value) == ("race", severity == "warning")
    assert ("both write the same value" in str(race)) == race.same_value
    (cause,) = group_findings([(race, "launch")])
    assert cause.severity == severity


def test_a_cause_is_as_grave_as_its_gravest_finding():
    found = []
    for difference in (0, 1, 0):
        machine = Machine(stop_at_findings=False)
        data = np.zeros(1, np.uint32)
        machine.add_array(data, "data")
        module = machine.load(ptx_of(STORES, "sm_90a"))
        machine.launch(module, grid=(1, 1, 1), block=(64, 1, 1), args=[data, difference])
        machine.run()
        found += [(finding, f"launch {difference}") for finding in machine.findings]
    (cause,) = group_findings(found)
    assert (cause.severity, cause.count, cause.launch) == ("error", 3, "launch 1")
    assert not cause.finding.same_value


INSTANCES = """
template <int n> __global__ void both(u32* data) {
    data[0] = threadIdx.x + n;
}
template __global__ void both<1>(u32*);
template __global__ void both<2>(u32*);
"""


def test_instances_of_a_template_have_their_causes_in_common():
    machine = Machine(stop_at_findings=False)
    data = np.zeros(1, np.uint32)
    machine.add_array(data, "data")
    module = machine.load(ptx_of(INSTANCES, "sm_90a"))
    assert len(module.kernels) == 2
    for kernel in module.kernels:
        machine.launch(module, kernel, grid=(2, 1, 1), block=(1, 1, 1), args=[data])
        machine.run()
        data[0] = 99
    assert [finding.kind for finding in machine.findings] == ["race"]
