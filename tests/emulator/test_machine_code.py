"""Costs from a kernel's machine code: reading nvdisasm's listing, what belongs to which line of
PTX, and what the clock makes of it. Listings here are written by hand in nvdisasm's form."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import numpy as np
import pytest

from deep_moe import jit
from deep_moe.emulator import DisassemblyError, Machine, chips, machine_code
from deep_moe.emulator.machine_code import (
    Latencies,
    LineCost,
    line_costs,
    parse_listing,
)
from deep_moe.jit.launch import MemoryRegion, RankLaunch, run_emulated

from .raw_ptx import entry
from .test_clock import chip

LATENCIES = Latencies(shared=22, shuffle=23, xu=16)
NO_COUNTER = 7


def code(
    address: int,
    text: str,
    line: int = 0,
    stall: int = 1,
    sets: int = NO_COUNTER,
    waits: int = 0,
) -> str:
    """An instruction as `nvdisasm -c -hex -gp` lists it, with its line if that changes."""
    high = stall << 41 | sets << 46 | NO_COUNTER << 49 | waits << 52
    where = f'\t//## File ".nv_debug_ptx_txt", line {line}\n' if line else ""
    return (
        f"{where}        /*{address:04x}*/                   {text} ;"
        f"   /* 0x0000000000000001 */\n"
        f"                                             /* 0x{high:016x} */\n"
    )


def listing(*parts: str, kernel: str = "k") -> list[str]:
    return (f'\t.section\t.text.{kernel},"ax",@progbits\n' + "".join(parts)).splitlines()


def test_a_listing_gives_blocks_with_lines_stalls_and_counters():
    text = listing(
        code(0x00, "S2R R0, SR_TID.X", 5, stall=2, sets=1),
        code(0x10, "LDS R1, [R0]", 6, sets=0, waits=0b10),
        ".L_x_1:\n",
        code(0x20, "FADD R1, R1, R1", 7, stall=4, waits=0b1),
        code(0x30, "@!P0 BRA `(.L_x_1)", 8, stall=5),
        code(0x40, "EXIT"),
    )
    others = listing(code(0, "NOP", 99), kernel="another")
    first, loop, last = parse_listing(others + text + others, "k")
    assert [one.name for one in first + loop + last] == ["S2R", "LDS", "FADD", "BRA", "EXIT"]
    assert [one.line for one in first + loop + last] == [5, 6, 7, 8, 8]
    assert [one.stall for one in first + loop + last] == [2, 1, 4, 5, 1]
    assert (first[0].sets, first[1].sets, first[1].waits, loop[0].sets) == (1, 0, 0b10, None)
    with pytest.raises(DisassemblyError, match="no code of 'other'"):
        parse_listing(text, "other")


PTX = """.visible .entry k()
{
 ld.shared.f32 %f1, [%r1];
 add.f32 %f2, %f1, %f1;
 st.shared.f32 [%r1], %f2;
$L_loop:
 mul.f32 %f3, %f3, %f2;
 st.shared.f32 [%r2], %f3;
 @%p1 bra $L_loop;
 ret;
}"""


def costs_of(*parts: str) -> dict[int, LineCost]:
    return line_costs(PTX, parse_listing(listing(*parts), "k"), LATENCIES)


def test_an_instruction_that_waits_for_a_load_is_charged_with_it():
    costs = costs_of(
        code(0x00, "LDS R1, [R0]", 3, stall=1, sets=0),
        code(0x10, "FADD R2, R1, R1", 4, stall=5, waits=1),
        code(0x20, "STS [R0], R2", 5, stall=2),
    )
    assert [costs[line].cycles for line in (3, 4, 5)] == [1, 22 - 1 + 5, 2]
    assert [costs[line].issue for line in (3, 4, 5)] == [1, 1, 1]
    assert (costs[4].fma, costs[4].alu, costs[3].alu) == (1, 0, 0)


def test_of_an_unrolled_loop_the_mean_counts():
    one = [
        lambda at: code(at, "FMUL R3, R3, R2", 7, stall=4),
        lambda at: code(at, "STS [R4], R3", 8, stall=1),
    ]
    parts = [make(0x10 * i) for i, make in enumerate(4 * one)]
    costs = costs_of(".L_x_1:\n", *parts, code(0x80, "@P1 BRA `(.L_x_1)", 9, stall=5))
    assert (costs[7].issue, costs[7].cycles, costs[8].cycles) == (1, 4, 1)
    # A quarter of a branch: what it costs when it is taken is the chip's.
    assert (costs[9].issue, costs[9].cycles, costs[9].has_branch) == (0.25, 0.25, True)


def test_an_unrolled_loop_without_memory_is_known_by_its_branches():
    ptx = ".visible .entry k()\n{\n$L_loop:\n add.s32 %r1, %r1, 1;\n @%p1 bra $L_loop;\n ret;\n}"
    parts = [
        part
        for i in range(8)
        for part in (
            code(0x20 * i, "VIADD R1, R1, 0x1", 4, stall=13),
            code(0x20 * i + 0x10, "@P0 BRA `(.L_x_9)", 5, stall=5),
        )
    ]
    blocks = parse_listing(listing(*parts, ".L_x_9:\n", code(0x100, "EXIT", 6)), "k")
    costs = line_costs(ptx, blocks, LATENCIES)
    assert (costs[4].issue, costs[4].alu, costs[4].cycles, costs[5].issue) == (1, 1, 13, 1)


def test_what_the_compiler_moved_is_charged_where_it_went():
    store = [code(0x10 * i, "STS [R0], R2", 5) for i in range(1, 9)]
    costs = costs_of(code(0, "IMAD R9, R1, R2, R3", 7, stall=3), *store)
    assert 7 not in costs
    assert costs[3].cycles == 3 / 8  # the block is there eight times, says its store
    assert costs[5].cycles == 1


BODY = """
ld.global.u32 %r1, [%p0];
add.u32 %r2, %r1, 5;
setp.eq.u32 %c1, %r1, 7;
@%c1 bra $SKIP;
add.u32 %r2, %r2, 1;
$SKIP:
st.global.u32 [%p0], %r2;
"""


def timed(costs: dict[int, LineCost] | None, **values: float) -> tuple[float, int]:
    machine = Machine(clock=chip(**values))
    array = np.full(1, 7, np.uint32)
    machine.add_array(array, "array")
    text = entry(BODY, 1)
    (kernel,) = machine.load(text).kernels
    loaded = machine.load(text, costs=None if costs is None else {kernel: costs})
    machine.launch(loaded, grid=(1, 1, 1), block=(1, 1, 1), args=[array])
    machine.run()
    (launch,) = machine.launch_times
    return launch.ns, int(array[0])


def line_of(words: str) -> int:
    (found,) = [n for n, line in enumerate(entry(BODY, 1).splitlines(), 1) if words in line]
    return found


def test_the_clock_charges_what_the_lines_cost_and_results_stay():
    none, value = timed({})
    assert value == 12
    line = line_of("add.u32 %r2, %r1, 5")
    more, again = timed({line: LineCost(issue=4, cycles=500)})
    assert again == value
    assert more == pytest.approx(none + 500, abs=1)
    # Of the warp's own cycles and its scheduler's pipes the longer one.
    piped, _ = timed({line: LineCost(issue=400, alu=400, cycles=500)}, alu_cycles=2)
    assert piped == pytest.approx(none + 800, abs=1)


def test_a_branch_that_became_a_predicate_does_not_jump():
    line = line_of("bra $SKIP")
    kept, _ = timed({line: LineCost(has_branch=True)}, branch_cycles=300)
    gone, _ = timed({}, branch_cycles=300)
    assert kept == pytest.approx(gone + 300, abs=1)


def test_costs_need_a_chip_and_a_kernel_that_is_there():
    text = entry(BODY, 1)
    with pytest.raises(ValueError, match="costs need a chip"):
        Machine().load(text, costs={"kernel": {}})
    with pytest.raises(ValueError, match="no kernel 'other'"):
        Machine(clock="h100").load(text, costs={"other": {}})


def test_without_nvdisasm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv(machine_code.DISASSEMBLER_VARIABLE, "")
    assert machine_code.find_disassembler() is None
    with pytest.raises(DisassemblyError, match="nvidia-cuda-nvdisasm"):
        machine_code.read_costs(b"", "", "k", chips.load("h100"))


def test_a_program_that_is_no_nvdisasm_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv(machine_code.DISASSEMBLER_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(DisassemblyError, match="cannot be run"):
        machine_code.read_costs(b"", "", "k", chips.load("h100"))
    monkeypatch.setenv(machine_code.DISASSEMBLER_VARIABLE, sys.executable)  # it has no option -hex
    with pytest.raises(DisassemblyError, match="failed"):
        machine_code.read_costs(b"", "", "k", chips.load("h100"))


SOURCE = """
struct Args { float* values; };
extern "C" __global__ void scale(const __grid_constant__ Args args) {
    const float v = args.values[threadIdx.x];
    __shared__ float shared[32];
    shared[threadIdx.x ^ 1] = v;
    __syncthreads();
    args.values[threadIdx.x] = shared[threadIdx.x] * v + 1;
}
"""


class Args(ctypes.Structure):
    _fields_ = (("values", ctypes.c_uint64),)


def launch_scale(array: np.ndarray, arch: str) -> RankLaunch:
    kernel = jit.compile_cached(SOURCE, arch=arch, kernel="scale", for_emulator=True)
    region = MemoryRegion("values", array.ctypes.data, array.nbytes, is_writable=True)
    return RankLaunch(0, kernel, 1, 32, 0, Args(array.ctypes.data), (region,))


def test_a_kernel_made_for_the_emulator_gets_its_machine_code(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    asked = []

    def read(cubin: bytes, ptx: str, kernel: str, on: object) -> dict[int, LineCost]:
        asked.append((cubin[:4], "scale" in ptx, kernel, on))
        return {line: LineCost(issue=1, cycles=1000) for line in range(1, 200)}

    monkeypatch.setattr(machine_code, "read_costs", read)
    array = np.ones(32, np.float32)
    h100, machines = chips.load("h100"), []
    for machine_code_asked in (False, True):
        run_emulated(
            [launch_scale(array, "sm_90a")],
            seed=0,
            checks=True,
            clock=h100,
            observe=machines.append,
            machine_code=machine_code_asked,
        )
    assert asked == [(b"\x7fELF", True, "scale", h100)]
    plain, read_ones = (machine.launch_times[0].ns for machine in machines)
    assert read_ones > plain + 3000
    assert (array == 5).all()  # 1 * 1 + 1, squared and 1 more
    with pytest.raises(ValueError, match="needs a chip"):
        run_emulated(
            [launch_scale(array, "sm_90a")],
            seed=0,
            checks=True,
            clock="virtual",
            machine_code=True,
        )


def knows_these_chips() -> bool:
    """Whether there is an nvdisasm of CUDA 13 or newer."""
    found = machine_code.find_disassembler()
    if found is None:
        return False
    text = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)", text)
    return release is not None and int(release[1]) >= 13


@pytest.mark.skipif(not knows_these_chips(), reason="there is no nvdisasm of CUDA 13")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_costs_of_a_kernel_of_its_own_machine_code(arch, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    kernel = jit.compile_cached(SOURCE, arch=arch, kernel="scale")
    on = chips.load("h100" if arch == "sm_90a" else "b200")
    costs = machine_code.read_costs(kernel.cubin, kernel.ptx, "scale", on)
    lines = kernel.ptx.splitlines()
    of = {lines[line - 1].split()[0].partition(".")[0]: cost for line, cost in costs.items()}
    assert of["fma"].fma == 1
    assert of["bar"].issue >= 1
    assert 15 <= sum(cost.issue for cost in costs.values()) <= 60
    array = np.ones(32, np.float32)
    run_emulated([launch_scale(array, arch)], seed=0, checks=True, clock=on, machine_code=True)
    assert (array == 2).all()
