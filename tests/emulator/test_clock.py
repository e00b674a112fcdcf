"""Simulated time: queues beside times worked out by hand, the order of things, and that neither
results nor reports change with it. The chip of these tests has one cycle in a nanosecond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from warpcheck import (
    Chip,
    Deadlock,
    LaunchError,
    LaunchTime,
    Machine,
    RaceDetected,
    chips,
)
from warpcheck.library import load

from .raw_ptx import entry

ROUND: dict[str, float] = {
    "num_sms": 4,
    "max_clock_mhz": 1000,
    "mma_clock_mhz": 1000,
    "power_slope_mhz": 0,
    "issue_gap_cycles": 2,
    "dependent_cycles": 2,
    "branch_cycles": 0,
    "l2_near_latency_cycles": 300,
    "l2_far_latency_cycles": 300,
    "hbm_latency_ns": 200,
    "l2_gb_per_s": 1e6,
    "sm_bytes_per_cycle": 1e4,
    "link_gb_per_s": 1e6,
    "tma_issue_cycles": 10,
    "tma_in_flight_kib": 1024,
    "mbarrier_wake_cycles": 45,
    "mbarrier_test_cycles": 20,
    "cta_start_ns": 0,
    "kernel_exit_ns": 0,
}


def chip(**values: float) -> Chip:
    return chips.load("h100").replace(**{**ROUND, **values})


def run(
    body: str,
    *arrays: np.ndarray,
    on: Chip,
    ctas: int = 1,
    threads: int = 32,
    shared_bytes: int = 0,
    runs: int = 1,
    **options: Any,
) -> Machine:
    """The kernel `runs` times, each in a run of its own: the last one finds L2 filled."""
    machine = Machine(clock=on, **options)
    for index, array in enumerate(arrays):
        machine.add_array(array, f"array {index}")
    loaded = machine.load(entry(body, len(arrays)), name="test.ptx")
    for _ in range(runs):
        machine.launch(
            loaded,
            grid=(ctas, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=shared_bytes,
            args=[array.ctypes.data.to_bytes(8, "little") for array in arrays],
        )
        machine.run()
    return machine


def ns_of(*args: Any, **kwargs: Any) -> float:
    (launch,) = run(*args, **kwargs).launch_times
    return launch.ns


def zeros(num_bytes: int) -> np.ndarray:
    """At a multiple of 1024 bytes."""
    storage = np.zeros(num_bytes + 1024, np.uint8)
    offset = -storage.ctypes.data % 1024
    return storage[offset : offset + num_bytes]


def test_dependent_loads_take_the_latency_of_l2_each():
    # Each load waits for the one before; 300 cycles, and 2 for the load itself.
    def chase(count: int) -> str:
        return "".join(
            ["ld.global.u64 %rd0, [%p0];\n"]
            + [
                f"""
add.u64 %rd{i + 1}, %p0, %rd{i};
ld.global.u64 %rd{i + 1}, [%rd{i + 1}];"""
                for i in range(count - 1)
            ]
        )

    array = zeros(128)
    spans = [ns_of(chase(count), array, on=chip(), runs=2) for count in (4, 8)]
    # An addition of 64 bits is two instructions of 2 cycles.
    assert spans[1] - spans[0] == pytest.approx(4 * (300 + 2 + 4), abs=0.1)


def test_memory_comes_at_its_rate_behind_its_latency():
    def copies(count: int) -> str:
        issue = "".join(
            f"""
add.u64 %rd1, %p0, {16384 * i};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16384, [%r0];"""
            for i in range(count)
        )
        return f"""
.shared .align 1024 .b8 barrier[1024]; .shared .align 1024 .b8 data[16384];
mov.u32 %r0, barrier; mov.u32 %r1, data; mov.u32 %r2, %tid.x;
setp.ne.u32 %c0, %r2, 0;
@%c0 bra done;
mbarrier.init.shared.b64 [%r0], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r0], {16384 * count};
{issue}
again: mbarrier.try_wait.parity.shared.b64 %c1, [%r0], 0;
@!%c1 bra again;
done:"""

    on = chip(hbm_gb_per_s=10, shared_bytes_per_cycle=1e4)
    array = zeros(16384 * 16)
    spans = [ns_of(copies(count), array, on=on, checks=False, threads=32) for count in (4, 8, 16)]
    # 16384 bytes at 10 bytes a nanosecond.
    assert spans[1] - spans[0] == pytest.approx(4 * 1638.4, abs=0.1)
    assert spans[2] - spans[1] == pytest.approx(8 * 1638.4, abs=0.1)
    # What L2 has comes at the SM's rate: 16 bytes in a cycle.
    slow = chip(sm_bytes_per_cycle=16, shared_bytes_per_cycle=1e4)
    warm = [ns_of(copies(n), array, on=slow, checks=False, runs=2) for n in (4, 8)]
    assert warm[1] - warm[0] == pytest.approx(4 * 1024, abs=0.1)


@pytest.mark.parametrize(
    ("n", "a", "num_additions", "num_warpgroups", "cycles"),
    [
        (128, "{%r0, %r1, %r2, %r3}", 0, 1, 64),  # half a cycle for each column
        (8, "%rd0", 0, 1, 18),  # A and B through shared memory's port
        (8, "{%r0, %r1, %r2, %r3}", 0, 1, 13),  # A out of the registers
        # Meanwhile the scheduler issues nothing of its other warp.
        (8, "{%r0, %r1, %r2, %r3}", 10, 2, 2 * (10 + 12)),
        (8, "%rd0", 10, 2, 2 * 18),
    ],
)
def test_products_take_the_tensor_cores_rate(
    n: int, a: str, num_additions: int, num_warpgroups: int, cycles: int
):
    def products(count: int) -> str:
        registers = ", ".join(f"%f{i}" for i in range(n // 2))
        additions = [f"add.f32 %g{i}, %g{i}, %g{i};" for i in range(num_additions)]
        one = f"""
wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, {a}, %rd0, %c0, 1, 1;
{" ".join(additions)}"""
        return f"""
.shared .align 1024 .b8 data[16384]; .reg .f32 %f<64>, %g<16>;
mov.u64 %rd0, 0x4000004000000040;
setp.eq.u32 %c0, 0, 1;
wgmma.fence.sync.aligned;
{one * count}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;"""

    def span(count: int) -> float:
        on = chip(issue_gap_cycles=1, mma_issue_cycles=1)
        machine = Machine(clock=on, checks=False, products=False)
        text = entry(products(count), 0).replace("sm_100a", "sm_90a")
        machine.launch(machine.load(text), grid=(1, 1, 1), block=(128 * num_warpgroups, 1, 1))
        machine.run()
        (launch,) = machine.launch_times
        assert launch.tensor_share > 0.1 or n == 8
        return launch.ns

    # Products of 64 rows with 32 bytes of K, on each of the SM's four tensor cores.
    assert span(24) - span(8) == pytest.approx(16 * cycles, rel=0.01)


def test_a_wait_lasts_until_its_event():
    body = """
.shared .align 8 .b64 barrier;
mov.u32 %r0, barrier; mov.u32 %r2, %tid.x;
setp.ne.u32 %c0, %r2, 0;
@!%c0 mbarrier.init.shared.b64 [%r0], 1;
bar.sync 0;
setp.lt.u32 %c1, %r2, 32;
@%c1 bra waits;
nanosleep.u32 DURATION;
setp.ne.u32 %c2, %r2, 32;
@!%c2 mbarrier.arrive.shared.b64 %rd0, [%r0];
bra done;
waits: mbarrier.try_wait.parity.shared.b64 %c3, [%r0], 0;
@!%c3 bra waits;
done:"""
    spans = []
    for duration in (1_000, 50_000):
        machine = run(
            body.replace("DURATION", str(duration)), on=chip(), threads=64, keep_waits=True
        )
        spans.append(machine.launch_times[0].ns)
        assert machine.statistics.warp_instructions < 40  # nobody polls
        (wait,) = [w for w in machine.waits if w.kind == "mbarrier"]
        assert (wait.launch, wait.cta, wait.warp) == (1, 0, 0)
        assert wait.end_ns - wait.start_ns == pytest.approx(duration, abs=60)
    assert spans[1] - spans[0] == pytest.approx(49_000, abs=1)


def test_warps_of_one_scheduler_share_its_pipes():
    # 400 LOP3 of a warp: 2 cycles each to issue, and 2 of the scheduler's ALU.
    body = "lop3.b32 %r1, %r1, %r2, %r3, 0x96;\n" * 400
    alone, on_four, two_each = (ns_of(body, on=chip(), threads=n) for n in (32, 128, 256))
    assert alone == pytest.approx(800, abs=4)
    assert on_four == pytest.approx(alone, abs=1)
    assert two_each == pytest.approx(2 * alone, rel=0.05)


def test_ctas_that_find_no_room_come_later():
    body = "nanosleep.u32 10000;"
    spans = [
        ns_of(body, on=chip(), ctas=ctas, shared_bytes=shared_bytes)
        for ctas, shared_bytes in ((4, 120_000), (8, 100_000), (8, 120_000), (12, 120_000))
    ]
    assert spans[0] == pytest.approx(10_000, abs=20)
    assert spans[1] == pytest.approx(10_000, abs=20)  # two on each of four SMs
    assert spans[2] == pytest.approx(20_000, abs=40)
    assert spans[3] == pytest.approx(30_000, abs=60)
    with pytest.raises(LaunchError, match="no room for a CTA"):
        run(body, on=chip(shared_kib_per_sm=64), shared_bytes=120_000)


def test_memory_of_another_rank_comes_over_the_link():
    ptx = entry("ld.global.u32 %r0, [%p0];\nst.global.u32 [%p1], %r0;", 2)

    def span(home: int) -> float:
        theirs, own = zeros(128), zeros(128)
        machine = Machine(clock=chip(link_latency_ns=700))
        machine.add_memory(0, theirs.ctypes.data, 128, "theirs", home=home)
        machine.add_array(own, "own")
        machine.launch(machine.load(ptx), grid=(1, 1, 1), block=(1, 1, 1), args=[theirs, own])
        machine.run()
        (launch,) = machine.launch_times
        assert launch.link_bytes == (4 if home else 0)
        return launch.ns

    assert span(1) - span(0) == pytest.approx(1400, abs=1)


def launch_time(body: str, homes: tuple[int, ...], on: Chip, ctas: int = 1) -> LaunchTime:
    """Of rank 0's kernel; its arrays of 1 KiB lie on the ranks that `homes` names."""
    machine = Machine(clock=on, checks=False)
    arrays = [zeros(1024) for _ in homes]
    for index, (array, home) in enumerate(zip(arrays, homes, strict=True)):
        machine.add_memory(0, array.ctypes.data, 1024, f"array {index}", home=home)
    module = machine.load(entry(body, len(homes)))
    machine.launch(module, grid=(ctas, 1, 1), block=(32, 1, 1), args=arrays)
    machine.run()
    (launch,) = machine.launch_times
    return launch


def test_who_uses_a_peers_memory_does_not_keep_others_from_it():
    # CTA 0 reads the peer's memory over a slow link, CTA 1 goes to its own L2 meanwhile.
    chase = "".join(
        f"""
add.u64 %rd1, %p1, %rd0;
ld.global.u64 %rd0, [%rd1+{256 + 128 * (i % 4)}];"""
        for i in range(16)
    )
    body = f"""
mov.u32 %r0, %ctaid.x; setp.eq.u32 %c0, %r0, 0; mov.u64 %rd0, 0;
@%c0 bra remote;
{chase}
ret;
remote:
ld.global.u64 %rd2, [%p0];"""
    slow = chip(link_latency_ns=3000, hbm_latency_ns=0)
    alone = launch_time(body, (0, 0), slow, ctas=2).ns
    assert alone == pytest.approx(15 * 307, rel=0.01)  # nobody waits for the last load
    # The peer is this rank itself, so that the L2 that is asked 3 us later is its own.
    machine = Machine(clock=slow, checks=False)
    own, theirs = zeros(1024), zeros(1024)
    machine.add_array(own, "own")
    machine.add_memory(0, theirs.ctypes.data, 1024, "theirs", home=1)
    machine.mirror_memory(0, theirs.ctypes.data, onto=own.ctypes.data)
    machine.launch(
        machine.load(entry(body, 2)), grid=(2, 1, 1), block=(32, 1, 1), args=[theirs, own]
    )
    machine.run()
    (launch,) = machine.launch_times
    assert launch.link_bytes == 8
    assert launch.ns == pytest.approx(alone, rel=0.01)


def test_a_warps_lanes_may_go_to_memory_of_several_ranks():
    # Lanes take turns between their own memory and a peer's.
    body = """
mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 1; setp.eq.u32 %c0, %r1, 0;
selp.b64 %rd0, %p0, %p1, %c0;
mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
st.global.u32 [%rd0], %r0;"""
    for homes in ((0, 1), (1, 0)):
        launch = launch_time(body, homes, chip(link_latency_ns=3000))
        assert launch.link_bytes == 16 * 4


def write_and_poll(write: str, on: Chip, is_remote: bool = True) -> tuple[int, int]:
    """How long CTA 0 takes over `write` to what is its peer's at [%p0], and until CTA 1, which the
    peer's mirror image is, has seen it in its own memory. Not is_remote: both CTAs are of a rank
    whose memory [%p0] is."""
    body = f"""
mov.u32 %r0, %ctaid.x; setp.ne.u32 %c0, %r0, 0; mov.u32 %r9, 1;
@%c0 bra again;
nanosleep.u32 5000;
mov.u64 %rd0, %clock64;
{write}
mov.u64 %rd1, %clock64;
st.global.u64 [%p2], %rd0; st.global.u64 [%p2+8], %rd1;
ret;
again: ld.relaxed.sys.global.u32 %r1, [%p1];
setp.ne.u32 %c1, %r1, COUNT;
@%c1 bra again;
mov.u64 %rd2, %clock64;
st.global.u64 [%p2+16], %rd2;""".replace("COUNT", str(max(1, write.count(".add."))))
    machine = Machine(clock=on, checks=False)
    own, theirs, out = zeros(1024), zeros(1024), np.zeros(3, np.int64)
    machine.add_array(own, "own")
    machine.add_array(out, "out")
    machine.add_memory(0, theirs.ctypes.data, 1024, "theirs", home=1)
    machine.mirror_memory(0, theirs.ctypes.data, onto=own.ctypes.data)
    machine.launch(
        machine.load(entry(body, 3)),
        grid=(2, 1, 1),
        block=(1, 1, 1),
        args=[theirs if is_remote else own, own, out],
    )
    machine.run()
    return int(out[1] - out[0]), int(out[2] - out[0])


LINK: dict[str, float] = {"link_latency_ns": 3000, "fence_sys_ns": 1000, "hbm_latency_ns": 0}
POLL = 310  # cycles between two looks at a word, 300 of them for the last one


ADD = "red.relaxed.sys.global.add.u32 [%p0], %r9;"


@pytest.mark.parametrize(
    ("write", "count", "cycles"),
    [
        ("st.relaxed.sys.global.u32 [%p0], %r9;", 4, 2),
        ("st.volatile.global.u32 [%p0], %r9;", 4, 2),
        (ADD, 1, 4),
        (ADD, 4, 4),
        ("atom.relaxed.sys.global.add.u32 _, [%p0], %r9;", 4, 4),
        ("red.release.cta.global.add.u32 [%p0], %r9;", 4, 4),
        ("red.release.sys.global.add.u32 [%p0], %r9;", 1, 1004),
        ("st.async.mmio.release.sys.global.b32 [%p0], %r9;", 1, 1002),
    ],
)
def test_ordered_writes_to_a_peer_cost_their_issue_and_are_seen_after_the_link(
    write: str, count: int, cycles: int
):
    took, seen = write_and_poll(f"{write}\n" * count, chip(**LINK))
    assert took == pytest.approx(count * cycles, abs=4 * count)
    # An update takes its way to L2, too.
    way = 3000 + (0 if write.startswith("st") else 150)
    assert seen == pytest.approx(took + way + 300 + POLL / 2, abs=POLL / 2 + 20)


def test_a_fence_waits_once_for_all_writes_to_a_peer():
    spans = [
        write_and_poll(f"{ADD * count} fence.acq_rel.sys;", chip(**LINK))[0] for count in (1, 2, 8)
    ]
    # There and back, and the way in L2; then each costs its issue.
    assert spans[0] == pytest.approx(2 * 3150, abs=20)
    assert spans[1] - spans[0] == pytest.approx(4, abs=4)
    assert spans[2] - spans[0] == pytest.approx(7 * 4, abs=7 * 4)


STORE = "st.global.u32 [%p0+64], %r9;"
RELEASE = "red.release.gpu.global.add.u32 [%p0], %r9;"


@pytest.mark.parametrize(
    ("write", "cycles"),
    [
        (RELEASE, 500),
        (f"{STORE} {RELEASE}", 300 + 500),
        (f"fence.acq_rel.gpu; {ADD}", 600),
        (f"{STORE} fence.acq_rel.gpu; {ADD}", 300 + 600),
        (f"{STORE} fence.proxy.async; {ADD}", 300 + 500),
        (f"{STORE} fence.proxy.async.global; {ADD}", 10),
        (f"fence.acq_rel.sys; {ADD}", 1000),
        (f"{STORE} fence.acq_rel.sys; {ADD}", 1000),
    ],
)
def test_a_memory_barrier_leaves_when_earlier_writes_have_arrived(write: str, cycles: int):
    """And what is behind it is seen behind it."""
    on = chip(**LINK, memory_barrier_cycles=500, fence_gpu_cycles=600, fence_cta_cycles=10)
    took, seen = write_and_poll(write, on, is_remote=False)
    assert took == pytest.approx(cycles, abs=20)
    assert cycles < seen < cycles + 300 + POLL + 20


def test_a_rank_finds_its_own_ordered_writes_done():
    body = """
mov.u32 %r9, 1; mov.u32 %r8, 5; mov.u32 %r7, 7;
red.relaxed.sys.global.add.u32 [%p0], %r9;
red.relaxed.sys.global.add.u32 [%p0], %r9;
atom.relaxed.sys.global.add.u32 %r1, [%p0], %r9;
st.relaxed.sys.global.u32 [%p0+64], %r8;
ld.global.u32 %r2, [%p0+64];
st.relaxed.sys.global.u32 [%p0+128], %r8;
st.global.u32 [%p0+128], %r7;
red.relaxed.sys.global.add.u32 [%p0+192], %r9;
st.relaxed.sys.global.u32 [%p0+192], %r8;
st.global.u32 [%p1], %r1; st.global.u32 [%p1+4], %r2;"""
    machine = Machine(clock=chip(**LINK))
    theirs, own = zeros(1024), zeros(1024)
    machine.add_memory(0, theirs.ctypes.data, 1024, "theirs", home=1)
    machine.add_array(own, "own")
    machine.launch(
        machine.load(entry(body, 2)), grid=(1, 1, 1), block=(1, 1, 1), args=[theirs, own]
    )
    machine.run()
    (launch,) = machine.launch_times
    assert own.view(np.uint32)[:2].tolist() == [2, 5]
    assert theirs.view(np.uint32)[[0, 16, 32, 48]].tolist() == [3, 5, 7, 5]
    assert launch.ns > 3000


def test_a_kernel_ends_when_its_writes_to_a_peer_have_arrived():
    launch = launch_time(ADD.replace("%r9", "1"), (1,), chip(**LINK, atomic_cycles=0))
    assert launch.ns == pytest.approx(3150, abs=10)


def test_clocks_read_simulated_time():
    body = """
mov.u64 %rd0, %clock64; mov.u64 %rd1, %globaltimer;
nanosleep.u32 5000;
mov.u64 %rd2, %clock64; mov.u64 %rd3, %globaltimer;
sub.u64 %rd4, %rd2, %rd0; sub.u64 %rd5, %rd3, %rd1;
st.global.u64 [%p0], %rd4; st.global.u64 [%p0+8], %rd5;"""
    out = np.zeros(2, np.uint64)
    run(body, out, on=chip(max_clock_mhz=2000), threads=1)
    assert int(out[1]) == pytest.approx(5000, abs=20)
    assert int(out[0]) == pytest.approx(2 * int(out[1]), abs=20)


def test_a_wait_for_tensor_memory_lasts_as_long_as_its_load():
    def span(count: int) -> float:
        load = """
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];
tcgen05.wait::ld.sync.aligned;"""
        body = f"""
.shared .align 16 .b8 place[16];
mov.u32 %r0, place;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;
ld.shared.u32 %r1, [%r0];{load * count}
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;"""
        return ns_of(body, on=chip(tmem_latency_cycles=400), checks=False)

    # 400 cycles, two for the bytes, and two for each instruction.
    assert span(5) - span(1) == pytest.approx(4 * (400 + 2 + 4), rel=0.02)


def test_the_clock_falls_when_tensor_cores_work():
    text = entry(
        """
.reg .f32 %f<4>; mov.u32 %r9, 0;
again:
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3},
    {%r4, %r5}, {%f0, %f1, %f2, %f3};
add.u32 %r9, %r9, 1; setp.lt.u32 %c0, %r9, 2000; @%c0 bra again;""",
        0,
    )
    found = []
    for values in ({}, {"mma_clock_mhz": 900}):
        machine = Machine(clock=chip(**values), checks=False, products=False)
        machine.launch(machine.load(text), grid=(4, 1, 1), block=(128, 1, 1))
        machine.run()
        found.append(machine.launch_times[0].clock_mhz)
    assert found == [pytest.approx(1000), pytest.approx(900, rel=0.02)]


BUSY = """
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r9, 0;
again:
atom.global.add.u32 %r2, [%p0], 1;
atom.global.max.u32 %r3, [%p0+4], %r2;
add.u32 %r9, %r9, 1; setp.lt.u32 %c0, %r9, 20; @%c0 bra again;"""


def test_time_is_the_same_whatever_seed_schedule_and_checks_are():
    def times(**options: Any) -> list[Any]:
        out = np.zeros(2, np.uint32)
        machine = run(BUSY, out, on=chip(), ctas=8, threads=96, **options)
        assert out.tolist() == [8 * 96 * 20, 8 * 96 * 20 - 1]
        return machine.launch_times

    expected = times()
    for options in ({"seed": 5}, {"checks": False}, {"schedule": "last_warp", "seed": 3}):
        assert times(**options) == expected


def test_checks_work_with_a_chip():
    with pytest.raises(RaceDetected):
        run("mov.u32 %r0, %tid.x;\nst.global.u32 [%p0], %r0;", zeros(4), on=chip(), threads=64)


def test_a_deadlock_is_reported_with_a_chip():
    body = """
.shared .align 8 .b64 barrier;
mov.u32 %r0, barrier;
mbarrier.init.shared.b64 [%r0], 1;
again: mbarrier.try_wait.parity.shared.b64 %c3, [%r0], 0;
@!%c3 bra again;"""
    with pytest.raises(Deadlock, match="nothing changed"):
        run(body, on=chip(), threads=1)
    with pytest.raises(Deadlock, match="nothing changed"):
        run(
            "again: ld.volatile.global.u32 %r0, [%p0];\nsetp.eq.u32 %c0, %r0, 0;\n@%c0 bra again;",
            zeros(4),
            on=chip(),
            threads=1,
        )
    with pytest.raises(Deadlock, match="every warp waits"):
        run("bar.sync 1, 64;", on=chip(), threads=32)


def test_a_time_limit_of_the_kernel_ends_its_wait():
    body = """
.shared .align 8 .b64 barrier;
mov.u32 %r0, barrier;
mbarrier.init.shared.b64 [%r0], 1;
mov.u64 %rd0, %globaltimer;
again: mbarrier.try_wait.parity.shared.b64 %c3, [%r0], 0;
@%c3 bra done;
mov.u64 %rd1, %globaltimer; sub.u64 %rd2, %rd1, %rd0; setp.lt.u64 %c0, %rd2, 30000000000;
@%c0 bra again;
done:"""
    machine = run(body, on=chip(), threads=1)
    assert "nothing changed" in machine.stall


def test_chips_and_library_have_the_same_parameters():
    names = load().dm_chip_parameters().decode().split()
    assert names == list(chips.SCHEMA)
    for one in chips.CHIPS.values():
        assert sorted(one.parameters) == sorted(names)


def test_chips_refuse_wrong_values():
    h100 = chips.load("h100")
    assert h100.value("num_sms") == 132
    with pytest.raises(ValueError, match="h100, h200, b200, b300, gb200; got 'a100'"):
        chips.load("a100")
    with pytest.raises(ValueError, match="hbm_gb_per_s must be more than 0; got 0"):
        h100.replace(hbm_gb_per_s=0)
    with pytest.raises(ValueError, match="no parameter 'hbm'"):
        h100.replace(hbm=1)
    with pytest.raises(ValueError, match="tma_issue_cycles must be a number of at least 0; got -1"):
        h100.replace(tma_issue_cycles=-1)
    with pytest.raises(ValueError, match="missing: num_sms"):
        Chip("x", "sm_90a", {k: p for k, p in h100.parameters.items() if k != "num_sms"})
    with pytest.raises(ValueError, match=r"a chip \(h100, .*not 'h1'"):
        Machine(clock="h1")
    with pytest.raises(ValueError, match="products=False needs a chip"):
        Machine(products=False, checks=False)
    with pytest.raises(ValueError, match="checks=False"):
        Machine(clock="h100", products=False)
    with pytest.raises(ValueError, match="keep_waits=True needs a chip"):
        Machine(keep_waits=True)


def test_usage_says_when_memory_was_busy():
    # 16 loads of 512 bytes at 8 bytes per ns, one behind the other, 528 ns apart.
    body = "nanosleep.u32 20000;\nmov.u32 %r2, %tid.x;\nmul.wide.u32 %rd0, %r2, 16;\n"
    body += "add.u64 %rd0, %rd0, %p0;\n"
    body += "".join(
        f"ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd0+{512 * i}];\n" for i in range(16)
    )
    machine = run(body, zeros(8192), on=chip(hbm_gb_per_s=8, l2_gb_per_s=64))
    (launch,) = machine.launch_times
    (usage,) = machine.usage
    memory, l2 = usage.units["memory"], usage.units["L2"]
    assert usage.rank == 0
    assert launch.hbm_bytes == 8192
    assert memory.share(0, 19_900) == 0
    assert memory.share(20_000, 20_000 + 8 * 528) == pytest.approx(64 / 528, rel=0.05)
    for unit, rate in ((memory, 8), (l2, 64)):
        assert sum(unit.shares) * unit.step_ns == pytest.approx(8192 / rate, rel=1e-3)
    for name in ("links in", "links out", "tensor cores"):
        assert sum(usage.units[name].shares) == 0


def test_usage_of_a_long_run_has_longer_steps():
    body = "ld.global.u64 %rd0, [%p0];\nnanosleep.u32 TIME;\nld.global.u64 %rd1, [%p0+4096];\n"
    short, long = (
        run(body.replace("TIME", str(ns)), zeros(8192), on=chip(hbm_gb_per_s=8)).usage[0]
        for ns in (1_000, 900_000)
    )
    assert short.units["memory"].step_ns < long.units["memory"].step_ns
    for usage in (short, long):
        memory = usage.units["memory"]
        assert len(memory.shares) <= 4096
        assert sum(memory.shares) * memory.step_ns == pytest.approx(64 / 8, rel=1e-3)


def test_a_machine_without_a_chip_has_no_usage():
    assert Machine().usage == []
