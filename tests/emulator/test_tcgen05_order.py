"""What orders tcgen05 operations of different threads: PTX's fences, or a release and an acquire.

One thread fills tensor memory from shared memory, four warps read it, the thread fills it again.
"""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import EmulatorError, Machine, RaceDetected

from .device import aligned, pack_arguments, ptx_of

HAND_OVER = """
KERNEL()(u32* out) {
    u32 base = shared_address(dynamic_shared), warp = threadIdx.x / 32;
    u32 full = base, empty = base + 8, again = base + 16, source = base + 1024;
    for (u32 i = threadIdx.x; i < 1024; i += blockDim.x) ((u32*)dynamic_shared)[256 + i] = 7;
    fence_async();
    if (threadIdx.x == 0) {
        init_barrier(full, 1);
        init_barrier(empty, 128);
        init_barrier(again, 1);
    }
    if (warp == 0)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;"
            :: "r"(base + 24) : "memory");
    __syncthreads();
    u32 tmem = ((u32*)dynamic_shared)[6];
    u64 rows = 0x0000400800800000ull | ((source & 0x3FFFF) >> 4);
    if (threadIdx.x == 128) {
        asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;"
            :: "r"(tmem), "l"(rows) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(full) : "memory");
        WAIT(empty);
        AFTER
        asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;"
            :: "r"(tmem), "l"(rows) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(again) : "memory");
        wait(again, 0);
    } else if (warp < 4) {
        WAIT(full);
        AFTER
        u32 value;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];"
            : "=r"(value) : "r"(tmem + (warp * 32 << 16)));
        READ
        BEFORE
        asm volatile("mbarrier.arrive.ARRIVE.shared::cta.b64 _, [%0];" :: "r"(empty) : "memory");
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        out[threadIdx.x] = value;
    }
    __syncthreads();
    if (warp == 0)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(tmem));
}
"""
WAIT = """asm volatile("{ .reg .pred done;"
    "again: mbarrier.try_wait.parity.ORDER.shared::cta.b64 done, [%0], 0;"
    "@!done bra again; }" :: "r"(BARRIER) : "memory")"""
FENCES = {
    "BEFORE": 'asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");',
    "AFTER": 'asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");',
}


def hand_over(
    *,
    relaxed: bool,
    fences: tuple[str, ...] = ("BEFORE", "AFTER"),
    waits_for_loads: bool = True,
    strict: bool = False,
) -> list[EmulatorError]:
    """What the checks find."""
    source = HAND_OVER
    for barrier in ("full", "empty"):
        wait = WAIT.replace("BARRIER", barrier)
        source = source.replace(f"WAIT({barrier})", wait)
    source = source.replace("ORDER", "relaxed.cluster" if relaxed else "acquire.cta")
    source = source.replace("ARRIVE", "relaxed.cluster" if relaxed else "release.cta")
    for name, fence in FENCES.items():
        source = source.replace(name, fence if name in fences else "")
    read = 'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");' if waits_for_loads else ""
    source = source.replace("READ", read)
    out = np.zeros(128, np.uint32)
    machine = Machine(stop_at_findings=False, strict_tcgen05=strict)
    machine.add_memory(0, out.ctypes.data, out.nbytes, "out")
    machine.launch(
        machine.load(ptx_of(source, "sm_100a")),
        "kernel",
        grid=(1, 1, 1),
        block=(160, 1, 1),
        shared_bytes=8192,
        args=[out.ctypes.data.to_bytes(8, "little")],
    )
    machine.run()
    assert (out == 7).all()
    return machine.findings


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("relaxed", [False, True])
def test_fences_order(relaxed: bool, strict: bool) -> None:
    assert hand_over(relaxed=relaxed, strict=strict) == []


def test_release_and_acquire_order_finished_operations() -> None:
    assert hand_over(relaxed=False, fences=()) == []


INCOMPLETE = pytest.mark.parametrize("fences", [(), ("BEFORE",), ("AFTER",)])


@INCOMPLETE
def test_relaxed_operations_need_both_fences(fences: tuple[str, ...]) -> None:
    findings = hand_over(relaxed=True, fences=fences)
    assert {finding.error for finding in findings} == {RaceDetected}


@INCOMPLETE
def test_a_strict_machine_asks_for_both_fences_everywhere(fences: tuple[str, ...]) -> None:
    findings = hand_over(relaxed=False, fences=fences, strict=True)
    assert {finding.error for finding in findings} == {RaceDetected}


@pytest.mark.parametrize("relaxed", [False, True])
def test_loads_that_nobody_waited_for_are_not_finished(relaxed: bool) -> None:
    findings = hand_over(relaxed=relaxed, waits_for_loads=False)
    assert {finding.error for finding in findings} == {RaceDetected}
    assert any("tcgen05.ld" in str(finding) for finding in findings)


# One warp fills shared memory by ordinary stores, a thread of another one has it copied to tensor
# memory, a third one, which hears of the second one's commit only, fills it again.
REFILL = """
KERNEL()(u32* out) {
    u32 base = shared_address(dynamic_shared), warp = threadIdx.x / 32;
    u32 full = base, empty = base + 8, loaded = base + 16, source = base + 1024;
    if (threadIdx.x == 0) {
        init_barrier(full, 32);
        init_barrier(empty, 1);
        init_barrier(loaded, 1);
    }
    if (warp == 0)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;"
            :: "r"(base + 24) : "memory");
    __syncthreads();
    u32 tmem = ((u32*)dynamic_shared)[6];
    if (warp == 0) {
        for (u32 i = threadIdx.x; i < 2048; i += 32) ((u32*)dynamic_shared)[256 + i] = 7;
        fence_async();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(full) : "memory");
    } else if (threadIdx.x == 32) {
        wait(full, 0);
        u64 rows = 0x0000400800800000ull | ((source & 0x3FFFF) >> 4);
        asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;"
            :: "r"(tmem), "l"(rows) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(empty) : "memory");
    } else if (threadIdx.x == 64) {
        wait(empty, 0);
        expect_bytes(loaded, 64);
        asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 64, [%2];" :: "r"(source + OFFSET), "l"(out), "r"(loaded) : "memory");
        wait(loaded, 0);
    }
    __syncthreads();
    if (warp == 0)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(tmem));
}
"""


@pytest.mark.parametrize(("offset", "is_read"), [(0, True), (4032, True), (4096, False)])
def test_what_a_finished_copy_has_read_may_be_filled_again(offset: int, is_read: bool) -> None:
    out = aligned(np.zeros(16, np.uint32))
    machine = Machine(stop_at_findings=False)
    machine.add_memory(0, out.ctypes.data, out.nbytes, "out")
    machine.launch(
        machine.load(ptx_of(REFILL.replace("OFFSET", str(offset)), "sm_100a")),
        "kernel",
        grid=(1, 1, 1),
        block=(96, 1, 1),
        shared_bytes=16384,
        args=pack_arguments((out,)),
    )
    machine.run()
    # Behind the copied 4 KiB the stores and the second filling have no order.
    assert [finding.error for finding in machine.findings] == ([] if is_read else [RaceDetected])
