"""Registers that nobody wrote, and registers that an asynchronous instruction still uses."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import InvalidOperation, RaceDetected, Uninitialized

from .raw_ptx import run_body

# ---- unwritten


def run(body: str) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    run_body("mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %p0;\n" + body, out)
    return out


@pytest.mark.parametrize(
    ("body", "register"),
    [
        ("st.global.u32 [%rd0], %r9;", "%r9"),
        ("st.global.u32 [%rd9], %r0;", "%rd9"),
        ("@%c3 st.global.u32 [%rd0], %r0;", "%c3"),
        ("mov.u32 %r1, %r9; st.global.u32 [%rd0], %r1;", "%r1"),
        ("add.u32 %r1, %r0, %r9; st.global.u32 [%rd0], %r1;", "%r1"),
        ("setp.eq.u32 %c1, %r9, 0; @%c1 st.global.u32 [%rd0], %r0;", "%c1"),
        ("mul.wide.u32 %rd1, %r9, 4; st.global.u32 [%rd1], %r0;", "%rd1"),
        ("cvt.u32.u64 %r1, %rd9; st.global.u32 [%rd0], %r1;", "%r1"),
        ("bar.sync %r9;", "%r9"),
        # Written in half of the lanes, by a branch and by a predicate.
        ("setp.lt.u32 %c1, %r0, 16; @%c1 mov.u32 %r1, 5; st.global.u32 [%rd0], %r1;", "%r1"),
        (
            "setp.lt.u32 %c1, %r0, 16; @%c1 bra past; mov.u32 %r1, 5; past: "
            "st.global.u32 [%rd0], %r1;",
            "%r1",
        ),
        ("setp.lt.u32 %c1, %r0, 9; selp.u32 %r1, %r0, %r9, %c1; st.global.u32 [%rd0], %r1;", "%r1"),
    ],
)
def test_a_register_that_nobody_wrote_is_found_where_it_decides(body: str, register: str) -> None:
    with pytest.raises(Uninitialized, match=rf"register {register} is used.*\n.*\n.*PTX line"):
        run(body)


@pytest.mark.parametrize(
    "body",
    [
        "mov.u32 %r1, %r9; add.u32 %r2, %r1, 1;",
        # Used only where it was written.
        "setp.lt.u32 %c1, %r0, 16; @%c1 mov.u32 %r1, 5; @%c1 st.global.u32 [%rd0], %r1;",
        "setp.lt.u32 %c1, %r0, 99; selp.u32 %r1, %r0, %r9, %c1; st.global.u32 [%rd0], %r1;",
        "setp.lt.u32 %c1, %r0, 16; @%c1 bra past; mov.u32 %r1, 5; st.global.u32 [%rd0], %r1; past:",
        # A word made of parts.
        "bfi.b32 %r1, %r0, %r9, 0, 16; bfi.b32 %r1, %r0, %r1, 16, 16; st.global.u32 [%rd0], %r1;",
    ],
)
def test_an_unwritten_register_that_decides_nothing_is_none_of_our_business(body: str) -> None:
    run(body)


# One half of %rd1 or %r1 was written, the other was not.
HALVES = {
    "low of 64": "mov.b64 %rd1, {%r0, %r9}; mov.b64 {%r1, %r2}, %rd1;",
    "high of 64": "mov.b64 %rd1, {%r9, %r0}; mov.b64 {%r2, %r1}, %rd1;",
    "cvt": "mov.b64 %rd1, {%r0, %r9}; cvt.u32.u64 %r1, %rd1; mov.b64 {_, %r2}, %rd1;",
    "a copy": "mov.b64 %rd2, {%r0, %r9}; mov.b64 %rd1, %rd2; mov.b64 {%r1, %r2}, %rd1;",
    "f32x2": "mov.b64 %rd2, {%r0, %r9}; add.rn.f32x2 %rd1, %rd2, %rd2;"
    " mov.b64 {%r1, %r2}, %rd1; mov.u32 %r1, %r0;",
    "quarters": "cvt.u16.u32 %h1, %r0; mov.b64 %rd1, {%h1, %h9, %h1, %h9};"
    " mov.b64 {%r1, %r2}, %rd1; mov.b32 {%h2, %h3}, %r1; cvt.u32.u16 %r1, %h2;",
    "halves of 32": "cvt.u16.u32 %h1, %r0; mov.b32 %r3, {%h9, %h1}; mov.b32 {_, %h2}, %r3;"
    " cvt.u32.u16 %r1, %h2; mov.b32 {%h4, _}, %r3; cvt.u32.u16 %r2, %h4;",
}


@pytest.mark.parametrize("name", HALVES)
def test_of_a_half_written_register_the_written_half_may_be_used(name: str) -> None:
    assert (run(HALVES[name] + "st.global.u32 [%rd0], %r1;") == np.arange(32)).all()


@pytest.mark.parametrize("name", HALVES)
def test_of_a_half_written_register_the_other_half_is_found(name: str) -> None:
    with pytest.raises(Uninitialized, match=r"register %r2 is used"):
        run(HALVES[name] + "st.global.u32 [%rd0], %r2;")


@pytest.mark.parametrize("name", ["low of 64", "high of 64", "a copy", "f32x2", "quarters"])
def test_a_half_written_register_cannot_be_stored_whole(name: str) -> None:
    with pytest.raises(Uninitialized, match=r"register %rd1 is used"):
        run(HALVES[name] + "st.global.b64 [%p0], %rd1;")


# ---- wgmma: D[64][8] += A[64][32] x B[8][32], A in registers, B of zeros

WGMMA_BEGIN = """
.shared .align 128 .b8 operand[256];
mov.u32 %r0, %tid.x;
mov.u32 %r1, operand;
setp.lt.u32 %c0, %r0, 64;
mad.lo.u32 %r2, %r0, 4, %r1;
mov.u32 %r3, 0;
@%c0 st.shared.u32 [%r2], %r3;
fence.proxy.async.shared::cta;
bar.sync 0;
and.b32 %r4, %r1, 0x3ffff;
shr.u32 %r4, %r4, 4;
cvt.u64.u32 %rd0, %r4;
or.b64 %rd0, %rd0, 0x1000080000;
mov.u32 %r10, 1; mov.u32 %r11, 1; mov.u32 %r12, 1; mov.u32 %r13, 1;
mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
add.u32 %r20, %r20, %r3;
add.u32 %r10, %r10, %r3;
setp.eq.u32 %c1, %r3, 0;
"""
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT, WAIT_1 = "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"
MMA = """wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3
    {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, %rd0, %c1, 1, 1;
"""
OTHER_MMA = MMA.replace("%r2", "%r3")
ZERO_OTHER = "mov.b32 %r30, 0; mov.b32 %r31, 0; mov.b32 %r32, 0; mov.b32 %r33, 0;"
READ = "add.u32 %r5, %r20, 1;"
OVERWRITE_A = "add.u32 %r10, %r0, 1;"


def test_an_sm100_descriptor_is_none_for_wgmma() -> None:
    lines = ("or.b64 %rd0, %rd0, 0x400000000000;", FENCE, MMA, COMMIT, WAIT)
    with pytest.raises(InvalidOperation, match="they are an SM100 constant"):
        run_wgmma(*lines)


def run_wgmma(*lines: str) -> None:
    run_body(WGMMA_BEGIN + "\n".join(lines), threads=128)


@pytest.mark.parametrize(
    "lines",
    [
        (FENCE, MMA, MMA, COMMIT, WAIT, READ),
        (FENCE, MMA, COMMIT, WAIT, OVERWRITE_A, READ),
        # The accumulators of an older group; a second group reads A as well.
        (ZERO_OTHER, FENCE, MMA, COMMIT, OTHER_MMA, COMMIT, WAIT_1, READ),
        # Nobody touched the registers in between.
        (FENCE, MMA, COMMIT, WAIT, MMA, COMMIT, WAIT),
        # The compiler's moves: what they copy stays in flight, and is not looked at.
        (FENCE, MMA, COMMIT, "mov.b32 %r6, %r20;", WAIT, "add.u32 %r5, %r6, 1;"),
        (FENCE, "mov.b32 %r21, %r22;", MMA, COMMIT, WAIT),
    ],
)
def test_registers_of_a_wgmma_that_was_waited_for(lines: tuple[str, ...]) -> None:
    run_wgmma(*lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((FENCE, MMA, COMMIT, READ), "%r20 is read while a wgmma may still write it"),
        ((FENCE, MMA, WAIT, READ), "%r20 is read while"),  # not committed
        ((FENCE, MMA, COMMIT, WAIT_1, READ), "%r20 is read while"),
        ((FENCE, MMA, COMMIT, "mov.b32 %r6, %r20; add.u32 %r5, %r6, 1;"), "%r6 is read while"),
        ((FENCE, MMA, COMMIT, "add.u32 %r20, %r0, 1;"), "%r20 is written while a wgmma may still"),
        ((FENCE, MMA, COMMIT, OVERWRITE_A), "%r10 is written while a wgmma may still use it"),
        (
            (ZERO_OTHER, FENCE, MMA, COMMIT, OTHER_MMA, COMMIT, WAIT_1, OVERWRITE_A),
            "%r10 is written while",
        ),
        ((FENCE, OVERWRITE_A, MMA), "%r10 is used by a wgmma, but no wgmma.fence follows"),
        ((FENCE, MMA, COMMIT, WAIT, READ, MMA), "%r20 is used by a wgmma, but no wgmma.fence"),
        ((MMA,), "wgmma before the warp's first wgmma.fence"),
    ],
)
def test_a_register_that_a_wgmma_uses_is_touched(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(RaceDetected, match=rf"(register )?{message}"):
        run_wgmma(*lines)


# ---- tcgen05.ld


@pytest.mark.parametrize("wait", ["tcgen05.wait::ld.sync.aligned;", ""])
@pytest.mark.parametrize("use", ["add.u32 %r5, %r10, 1;", "mov.b32 %r6, %r10; neg.s32 %r5, %r6;"])
def test_what_a_tensor_load_brings_is_there_after_the_wait(wait: str, use: str) -> None:
    body = f"""
.shared .align 4 .b32 base;
mov.u32 %r0, base;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;
bar.warp.sync -1;
ld.shared.u32 %r1, [%r0];
mov.u32 %r2, 7;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%r2}};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r10}}, [%r1];
{wait}
{use}
tcgen05.wait::ld.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
"""
    if wait:
        run_body(body, strict_tcgen05=True)
    else:
        run_body(body)
        with pytest.raises(RaceDetected, match=r"before tcgen05.wait::ld has waited.*\n  load: "):
            run_body(body, strict_tcgen05=True)
