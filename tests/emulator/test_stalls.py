"""What is said of a kernel that comes to a stop, and of barriers that count the wrong bytes."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import BarrierMisuse, Deadlock, Machine, NamedArray

from .device import aligned, pack_arguments, ptx_of

COPY = """
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1], 64, [%2];" :: "r"(base), "l"(data), "r"(base + 64) : "memory");
"""
EXPECT_AND_COPY = "KERNEL()(u32* data) {{ u32 base = shared_address(dynamic_shared); {body} }}"


def run(source: str, *, threads: int = 64, **options) -> Machine:
    data = aligned(np.zeros(64, np.uint32))
    machine = Machine(**options)
    machine.add_memory(
        0, data.ctypes.data, data.nbytes, "buffer", arrays=[NamedArray("flags", 0, (16,), 4)]
    )
    machine.launch(
        machine.load(ptx_of(source, "sm_100a"), name="test kernel"),
        "kernel",
        grid=(2, 1, 1),
        block=(threads, 1, 1),
        shared_bytes=1024,
        args=pack_arguments((data,)),
        roles={"loader": [0], "math": range(1, threads // 32)},
        shared_arrays=[NamedArray("tile", 0, (16,), 4), NamedArray("full_barriers", 64, (2,), 8)],
    )
    machine.run()
    return machine


def test_a_deadlock_tells_what_each_role_waits_for() -> None:
    source = EXPECT_AND_COPY.format(
        body=f"""
    if (threadIdx.x == 0) init_barrier(base + 64, 2);
    __syncthreads();
    if (threadIdx.x == 0) {{ expect_bytes(base + 64, 96); {COPY} }}
    __syncwarp();
    if (threadIdx.x < 32)
        while (*(volatile u32*)(data + 5) != 7) {{}}
    else if (threadIdx.x < 64)
        wait(base + 64, 0);
    else
        asm volatile("barrier.cta.sync.aligned 3, 64;" ::: "memory");
"""
    )
    with pytest.raises(Deadlock) as caught:
        run(source, threads=128)
    text = str(caught.value)
    assert "CTA 0, loader (warp 0) " in text
    assert "polls flags[5] (byte 20 of 'buffer'), which is 0x0" in text
    assert (
        "CTA 0, math warp 0 (warp 1) waits for mbarrier full_barriers[0] (shared offset 0x440): "
        "parity 0; it is in phase 0, 1 of 2 arrivals, 32 bytes still to come" in text
    )
    assert "96 bytes expected by CTA 0, loader (warp 0) at /kernel.cu:" in text
    assert "64 bytes brought for CTA 0, loader (warp 0) at /kernel.cu:" in text
    assert "1 arrived: CTA 0, loader (warp 0)" in text
    assert "CTA 0, math warp 1 (warp 2) waits for barrier 3 " not in text  # two warps make 64
    assert "and so do rank 0, CTA 1, loader (warp 0)" in text


def test_named_barriers_tell_how_many_have_come() -> None:
    arrive = 'asm volatile("barrier.cta.sync.aligned 3, 64;");'
    source = f"KERNEL()(u32*) {{ if (threadIdx.x < 32) {arrive} }}"
    with pytest.raises(Deadlock, match=r"barrier 3 \(32 of 64 threads have arrived\)"):
        run(source)


def test_a_kernel_that_gives_up_leaves_a_report_behind() -> None:
    source = """
KERNEL()(volatile u32* data) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (data[3] == 0 && now - start < 20000000000ull);
}
"""
    stall = run(source).stall
    assert stall.startswith("deadlock: nothing changed for 10 ms of virtual time")
    assert "polls flags[3]" in stall
    quick = "KERNEL()(u32* data) { data[threadIdx.x + 32 * blockIdx.x] = 1; }"
    assert run(quick, threads=32).stall == ""


def test_time_leaps_when_many_poll() -> None:
    source = """
KERNEL()(volatile u32* data) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        for (u32 i = 0; i < 32 && data[3] == 0; ++i) {}
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > 1000000) asm volatile("nanosleep.u32 200;");
    } while (data[3] == 0 && now - start < 100000000);
}
"""
    machine = run(source, threads=512)
    assert machine.stall
    assert machine.statistics.warp_instructions < 1_000_000


def test_bytes_that_come_a_phase_too_late_show_both_sides() -> None:
    source = EXPECT_AND_COPY.format(
        body=f"""
    if (threadIdx.x == 0) {{
        init_barrier(base + 64, 1);
        expect_bytes(base + 64, 48);
        {COPY}
        wait(base + 64, 0);
    }}
"""
    )
    # 64 bytes against 48: the phase cannot end.
    with pytest.raises(Deadlock, match="16 bytes more than expected"):
        run(source)
    # None expected: the phase ends before they come.
    source = EXPECT_AND_COPY.format(
        body=f"""
    if (threadIdx.x == 0) {{
        init_barrier(base + 64, 1);
        {COPY}
        expect_bytes(base + 64, 0);
        wait(base + 64, 0);
        wait(base + 64, 1);
    }}
"""
    )
    with pytest.raises(BarrierMisuse) as caught:
        run(source, schedule="late_copies")
    text = str(caught.value)
    assert (
        "64 bytes come to the mbarrier full_barriers[0] (shared offset 0x440) in its phase 1, but "
        "their copy was issued in phase 0, which has ended without them:" in text
    )
    assert "0 bytes expected by CTA" in text
    assert "1 arrived: CTA" in text
    assert "in the asynchronous bulk copy to shared memory issued by" in text


def test_a_cta_must_not_exit_while_bytes_are_expected() -> None:
    source = EXPECT_AND_COPY.format(
        body=f"""
    if (threadIdx.x == 0) {{
        init_barrier(base + 64, 2);
        expect_bytes(base + 64, 80);
        {COPY}
        u64 start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do {{
            asm volatile("nanosleep.u32 1000;");
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        }} while (now - start < 1000000);
    }}
"""
    )
    with pytest.raises(BarrierMisuse, match=r"expects 16 more bytes in its phase 0") as caught:
        run(source)
    assert "80 bytes expected by CTA" in str(caught.value)
    assert "64 bytes brought for CTA" in str(caught.value)
