"""Barriers whose phases cannot be told apart or whose memory is used for something else, and
registers that a warpgroup does not agree on."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import BarrierMisuse, InvalidOperation, LaunchError, Machine, Uninitialized

from .device import aligned, pack_arguments, ptx_of, run_kernel
from .raw_ptx import entry, run_body

ARRIVE = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(base) : "memory");'
LOOK = """
    asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;"
        " selp.u32 %0, 1, 0, done; }" : "=r"(done) : "r"(base), "r"(PARITY) : "memory");
"""
TOO_LATE = f"""
KERNEL()(volatile u32* flags) {{
    u32 base = shared_address(dynamic_shared), done;
    if (threadIdx.x == 0) init_barrier(base, 1);
    __syncthreads();
    if (threadIdx.x == 32) {{
        {LOOK.replace("PARITY", "0")}
        flags[1] = 1;
        while (!flags[0]) {{}}
        {LOOK.replace("PARITY", "AGAIN")}
    }} else if (threadIdx.x == 0) {{
        while (!flags[1]) {{}}
        for (u32 i = 0; i < PHASES; ++i) {{
            {ARRIVE}
            wait(base, i % 2);
        }}
        flags[0] = 1;
    }}
}}
"""


def run_too_late(phases: int, again: int = 0) -> None:
    source = TOO_LATE.replace("PHASES", str(phases)).replace("AGAIN", str(again))
    run_kernel(source, np.zeros(2, np.uint32), threads=64)


def test_a_waiter_that_misses_a_phase_cannot_tell() -> None:
    run_too_late(1)
    run_too_late(2, again=1)  # it waits for the second one now
    for phases in (2, 3):
        with pytest.raises(
            BarrierMisuse, match=r"phase 0 of the mbarrier .* and the next have ended"
        ):
            run_too_late(phases)


@pytest.mark.parametrize(
    "access",
    [
        "out[0] = *(u32*)dynamic_shared;",
        "((u32*)dynamic_shared)[1] = 5;",
        "*(uint4*)dynamic_shared = make_uint4(0, 0, 0, 0);",
        'asm volatile("st.shared.b8 [%0], %1;" :: "r"(base + 7), "r"(0) : "memory");',
    ],
)
def test_only_mbarrier_instructions_touch_a_barrier_in_use(access: str) -> None:
    source = (
        "KERNEL()(u32* out) { u32 base = shared_address(dynamic_shared);"
        f" init_barrier(base, 1); {access} }}"
    )
    with pytest.raises(BarrierMisuse, match=r"touches the mbarrier shared offset 0x400, which is"):
        run_kernel(source, np.zeros(1, np.uint32), threads=1)


def test_after_inval_it_is_memory_again() -> None:
    inval = 'asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(base) : "memory");'
    begin = (
        "KERNEL()(u32* out) { u32 base = shared_address(dynamic_shared);"
        f" init_barrier(base, 1); {inval} "
    )
    out = np.zeros(1, np.uint32)
    run_kernel(
        begin + "*(volatile u32*)dynamic_shared = 7; out[0] = *(volatile u32*)dynamic_shared; }",
        out,
        threads=1,
    )
    assert out[0] == 7
    with pytest.raises(Uninitialized):
        run_kernel(begin + "out[0] = *(volatile u32*)dynamic_shared; }", out, threads=1)


CHANGE = """
mov.u32 %r0, %tid.x;
setp.lt.u32 %c0, %r0, 64;
@%c0 bra LESS;
OTHERS
bra DONE;
LESS:
setmaxnreg.dec.sync.aligned.u32 24;
DONE:
"""


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ("setmaxnreg.dec.sync.aligned.u32 24;", None),
        ("setmaxnreg.dec.sync.aligned.u32 32;", "of its warpgroup has executed setmaxnreg.dec"),
        ("", "has executed [01] setmaxnreg, warp 0 of its warpgroup [01]"),
    ],
)
def test_a_warpgroup_changes_its_registers_together(others: str, message: str | None) -> None:
    body = CHANGE.replace("OTHERS", others)
    if message is None:
        run_body(body, threads=128, directives=".maxnreg 64")
    else:
        with pytest.raises(InvalidOperation, match=message):
            run_body(body, threads=128, directives=".maxnreg 64")


def test_a_run_can_go_on_behind_a_warpgroup_that_disagrees() -> None:
    others = "setmaxnreg.dec.sync.aligned.u32 32;"
    machine = Machine(stop_at_findings=False)
    text = entry(CHANGE.replace("OTHERS", others), 0, ".maxnreg 64")
    module = machine.load(text, name="test.ptx")
    machine.launch(module, "kernel", grid=(1, 1, 1), block=(128, 1, 1))
    machine.run()
    found = machine.findings
    assert found
    assert all("of its warpgroup has executed setmaxnreg.dec" in str(f) for f in found)


# Two warpgroups of at most 255 registers each: ptxas takes as many as the larger one asks for.
BUDGETS = """
mov.u32 %r0, %tid.x;
setp.lt.u32 %c0, %r0, 128;
@%c0 bra LESS;
setmaxnreg.inc.sync.aligned.u32 BUDGET;
bra DONE;
LESS:
setmaxnreg.dec.sync.aligned.u32 40;
DONE:
"""


@pytest.mark.parametrize("budget", [248, 232])
def test_a_launch_has_no_more_registers_than_the_largest_budget(budget: int) -> None:
    body = BUDGETS.replace("BUDGET", str(budget))
    run_body(body, threads=256, directives=".maxntid 256, 1, 1")
    with pytest.raises(InvalidOperation, match=f"inc to {budget}, the warp has 255 registers"):
        run_body(body, threads=256, directives=".maxnreg 255")


def test_a_copy_that_outlives_its_cta_is_named() -> None:
    source = """
KERNEL()(u32* out) {
    u32* words = (u32*)dynamic_shared;
    words[threadIdx.x] = threadIdx.x;
    fence_async();
    __syncthreads();
    if (threadIdx.x == 40) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 16;"
                     ::"l"(out), "r"(shared_address(words)) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
}
"""
    out = aligned(np.zeros(4, np.uint32))
    machine = Machine(schedule="late_copies")
    machine.add_memory(0, out.ctypes.data, out.nbytes, "out")
    module = machine.load(ptx_of(source, "sm_90a"))
    machine.launch(
        module,
        "kernel",
        grid=(1, 1, 1),
        block=(64, 1, 1),
        shared_bytes=1024,
        args=pack_arguments((out,)),
    )
    with pytest.raises(InvalidOperation) as caught:
        machine.run()
    text = str(caught.value)
    assert "the CTA exits while asynchronous copies" in text
    assert "issued by CTA 0, warp 1 at " in text
    assert "ret;" in text  # where the last thread was


def test_registers_of_a_launch() -> None:
    machine = Machine()
    module = machine.load(
        entry("setmaxnreg.dec.sync.aligned.u32 40;", 0, ".maxntid 256"), name="test.ptx"
    )

    def launch(registers: int | None) -> None:
        machine.launch(module, "kernel", grid=(1, 1, 1), block=(256, 1, 1), registers=registers)

    launch(None)
    machine.run()
    launch(40)
    machine.run()
    launch(32)
    with pytest.raises(InvalidOperation, match=r"setmaxnreg.dec to 40, the warp has 32 registers"):
        machine.run()
    with pytest.raises(LaunchError, match="registers must be 1 to 255, not 256"):
        launch(256)


GENERIC = """
KERNEL()(u32* out) {
    u32* words = (u32*)dynamic_shared;
    asm volatile("st.shared.u32 [%0], %1;" :: "l"(words + threadIdx.x), "r"(threadIdx.x)
        : "memory");
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "l"(words + 64) : "memory");
    out[threadIdx.x] = words[threadIdx.x];
}
"""


def test_a_run_can_go_on_behind_generic_addresses_of_shared_memory() -> None:
    out = np.full(32, 99, np.uint32)
    machine = Machine(stop_at_findings=False)
    machine.add_array(out, "out")
    module = machine.load(ptx_of(GENERIC, "sm_90a"))
    machine.launch(module, grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=1024, args=[out])
    machine.run()
    assert (out == np.arange(32)).all()
    assert [finding.error for finding in machine.findings] == [InvalidOperation] * 2
    assert "__cvta_generic_to_shared" in str(machine.findings[0])
