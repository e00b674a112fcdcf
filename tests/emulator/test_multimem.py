"""multimem: one address for the memory of several GPUs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from warpcheck import InvalidPtx, Machine, OutOfBounds, RaceDetected

from .raw_ptx import entry

# %rd0: the lane's place in multicast memory, %rd1: in `out`.
PLACES = "mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, {0}, %p0; mad.wide.u32 %rd1, %r0, {0}, %p1;"


def machine_for(
    body: str, members: np.ndarray, out: np.ndarray, *, element_bytes: int = 4, ctas: int = 1
) -> Machine:
    machine = Machine()
    machine.add_array(out, "out")
    for index, member in enumerate(members):
        machine.add_array(member, f"member {index}")
    address = machine.add_multicast([m.ctypes.data for m in members], members[0].nbytes, "all")
    module = machine.load(entry(PLACES.format(element_bytes) + body, 2))
    machine.launch(module, grid=(ctas, 1, 1), block=(32, 1, 1), args=[address, out])
    return machine


@pytest.mark.parametrize(
    ("operation", "reduce"),
    [
        ("add.u32", lambda x: x.sum(0, dtype=np.uint32)),
        ("min.s32", lambda x: x.view(np.int32).min(0).view(np.uint32)),
        ("max.u32", lambda x: x.max(0)),
        ("and.b32", lambda x: x[0] & x[1] & x[2]),
        ("or.b32", lambda x: x[0] | x[1] | x[2]),
        ("xor.b32", lambda x: x[0] ^ x[1] ^ x[2]),
    ],
)
def test_loads_reduce_what_all_members_hold(
    operation: str, reduce: Callable[[np.ndarray], np.ndarray]
) -> None:
    members = np.random.default_rng(0).integers(0, 2**32, (3, 32), dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    body = f"multimem.ld_reduce.relaxed.sys.global.{operation} %r1, [%rd0];"
    machine_for(body + "st.global.u32 [%rd1], %r1;", members, out).run()
    assert np.array_equal(out, reduce(members))


@pytest.mark.parametrize(("accumulator", "total"), [("", 2048), (".acc::f32", 2050)])
def test_sums_of_halves(accumulator: str, total: int) -> None:
    members = np.ones((3, 32 * 8), np.float16)
    members[0] = 2048  # and 1 is 2048 in halves
    out = np.zeros(32 * 8, np.float16)
    body = (
        f"multimem.ld_reduce.relaxed.gpu.global.add{accumulator}.v4.f16x2"
        " {%r1, %r2, %r3, %r4}, [%rd0]; st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};"
    )
    machine_for(body, members, out, element_bytes=16).run()
    assert (out == total).all()


def e4m3(values: list[float]) -> np.ndarray:
    """Codes of positive normal numbers."""
    exponent = np.floor(np.log2(values)).astype(int)
    fraction = np.array(values) / np.exp2(exponent) - 1
    return (((exponent + 7) << 3) + (fraction * 8).astype(int)).astype(np.uint8)


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [
        ("add.acc::f16", "e4m3x4", e4m3([15, 448, 3.5, 288])),  # 15 is 1 + 2 + 12, 448 the largest
        ("add", "e4m3x4", e4m3([15, 448, 3.5, 288])),
        ("min", "e4m3x4", e4m3([1, 240, 0.5, 16])),
        ("max", "e4m3x4", e4m3([12, 448, 2, 256])),
    ],
)
def test_reductions_of_fp8(operation: str, kind: str, expected: np.ndarray) -> None:
    rows = [e4m3([1, 240, 0.5, 16]), e4m3([2, 448, 1, 16]), e4m3([12, 256, 2, 256])]
    members = np.stack([np.tile(row, 32 * 4) for row in rows])
    out = np.zeros((32 * 4, 4), np.uint8)
    body = (
        f"multimem.ld_reduce.relaxed.gpu.global.{operation}.v4.{kind} {{%r1, %r2, %r3, %r4}},"
        " [%rd0]; st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};"
    )
    machine_for(body, members, out, element_bytes=16).run()
    assert (out == expected).all()


def test_stores_and_updates_reach_all_members() -> None:
    members = np.random.default_rng(1).integers(0, 9, (4, 32)).astype(np.float32)
    stored, updated = members.copy(), members.copy()
    out = np.arange(32, dtype=np.float32)
    load = "ld.global.f32 %r1, [%rd1];"
    machine_for(load + "multimem.st.weak.global.f32 [%rd0], %r1;", stored, out).run()
    machine_for(load + "multimem.red.release.sys.add.f32 [%rd0], %r1;", updated, out).run()
    assert np.array_equal(stored, np.tile(out, (4, 1)))
    assert np.array_equal(updated, members + out)


def test_other_instructions_may_not_use_it() -> None:
    members, out = np.zeros((2, 32), np.uint32), np.zeros(32, np.uint32)
    with pytest.raises(OutOfBounds, match="multicast memory 'all', which only multimem"):
        machine_for("ld.global.u32 %r1, [%rd0];", members, out).run()
    with pytest.raises(OutOfBounds, match="are not in multicast memory"):
        machine_for("multimem.ld_reduce.add.u32 %r1, [%rd1];", members, out).run()
    with pytest.raises(ValueError, match="all: multicast memory needs at least one member"):
        Machine().add_multicast([], 64, "all")


def test_weak_stores_race_with_accesses_of_a_member() -> None:
    members, out = np.zeros((2, 32), np.uint32), np.zeros(32, np.uint32)
    body = (
        "mov.u32 %r2, %ctaid.x; setp.eq.u32 %c0, %r2, 0; mov.u32 %r1, 7;"
        "@%c0 multimem.st.weak.global.u32 [%rd0], %r1;"
        f"mov.u64 %rd2, {members[1].ctypes.data}; mad.wide.u32 %rd2, %r0, 4, %rd2;"
        "@!%c0 ld.global.u32 %r3, [%rd2];"
    )
    with pytest.raises(RaceDetected, match="member 1"):
        machine_for(body, members, out, ctas=2).run()


@pytest.mark.parametrize(
    "form",
    [
        "multimem.ld_reduce.add.b32 %r1, [%rd0]",
        "multimem.ld_reduce.and.u32 %r1, [%rd0]",
        "multimem.ld_reduce.min.f32 %r1, [%rd0]",
        "multimem.ld_reduce.add.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0]",
        "multimem.red.inc.u32 [%rd0], %r1",
        "multimem.red.add.e4m3x4 [%rd0], %r1",
        "multimem.ld_reduce.add.acc::f16.u32 %r1, [%rd0]",
        "multimem.ld_reduce.weak.relaxed.add.u32 %r1, [%rd0]",
    ],
)
def test_forms_that_do_not_exist(form: str) -> None:
    with pytest.raises(InvalidPtx):
        Machine().load(entry(form + ";", 0))
