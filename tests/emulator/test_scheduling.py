"""Barriers, clusters, grids, ranks, the virtual clock, deadlocks, and what a seed decides."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import (
    BarrierMisuse,
    Deadlock,
    InvalidOperation,
    InvalidPtx,
    KernelTrap,
    LaunchError,
    Machine,
    Unsupported,
    supported_instructions,
)

from .device import pack_arguments, ptx_of, run_kernel
from .raw_ptx import HEADER, entry, run_body

SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_pass_data_from_producers_to_consumers(seed):
    out = np.zeros(64, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    __shared__ u32 slot[64];
    u32 t = threadIdx.x;
    for (u32 round = 0; round < 5; ++round) {
        if (t < 64) {
            slot[t] = t * round;
            asm volatile("barrier.cta.arrive.aligned 1, 128;" ::: "memory");
            asm volatile("barrier.cta.sync.aligned 2, 128;" ::: "memory");
        } else {
            asm volatile("barrier.cta.sync.aligned 1, 128;" ::: "memory");
            out[t - 64] += slot[127 - t];
            asm volatile("barrier.cta.arrive.aligned 2, 128;" ::: "memory");
        }
    }
}
""",
        out,
        threads=128,
        seed=seed,
    )
    assert out.tolist() == [(63 - n) * 10 for n in range(64)]


def test_barrier_reductions():
    out = np.zeros(96, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    u32 n = __syncthreads_count(threadIdx.x % 3 == 0);
    u32 all = __syncthreads_and(threadIdx.x < 96), any = __syncthreads_or(threadIdx.x == 200);
    out[threadIdx.x] = n + 1000 * (all != 0) + 10000 * (any != 0);
}
""",
        out,
        threads=96,
    )
    assert (out == 1032).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_distributed_shared_memory(seed):
    out = np.zeros((8, 32), np.uint32)
    run_kernel(
        """
KERNEL(__cluster_dims__(4))(u32* out) {
    __shared__ u32 mine[32];
    u32 rank = cluster_rank(), own = shared_address(mine) + 4 * threadIdx.x, value;
    mine[threadIdx.x] = rank * 100 + threadIdx.x;
    cluster_sync();
    asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %1, %2;"
                 " ld.shared::cluster.u32 %0, [a]; }"
                 : "=r"(value) : "r"(own), "r"((rank + 1) % 4) : "memory");
    out[blockIdx.x * 32 + threadIdx.x] = value;
    cluster_sync();
}
""",
        out,
        ctas=8,
        cluster=4,
        threads=32,
        seed=seed,
    )
    expected = [[(c + 1) % 4 * 100 + n for n in range(32)] for c in (0, 1, 2, 3, 0, 1, 2, 3)]
    assert out.tolist() == expected


GRID_BARRIER = """
__device__ void grid_sync(u32* counter, u32 round) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(counter, 1);
        while (*(volatile u32*)counter < gridDim.x * round) {}
        __threadfence();
    }
    __syncthreads();
}
KERNEL()(u32* counter, u32* out) {
    u32 i = blockIdx.x, n = gridDim.x;
    if (threadIdx.x == 0) out[i] = i;
    for (u32 round = 1; round <= 6; round += 2) {
        grid_sync(counter, round);
        u32 next = ((volatile u32*)out)[(i + 1) % n];
        grid_sync(counter, round + 1);
        if (threadIdx.x == 0) out[i] = next;
    }
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ctas_of_a_grid_are_resident(seed):
    out = np.zeros(16, np.uint32)
    run_kernel(GRID_BARRIER, np.zeros(1, np.uint32), out, ctas=16, threads=64, seed=seed)
    assert out.tolist() == [(n + 3) % 16 for n in range(16)]


def test_a_grid_beyond_the_residency_runs_in_turns():
    out = np.zeros(64, np.uint32)
    machine = Machine(max_resident_ctas=3)
    machine.add_memory(0, out.ctypes.data, out.nbytes, "out")
    body = (
        "mov.u32 %r0, %ctaid.x; mul.wide.u32 %rd0, %r0, 4; add.u64 %rd0, %rd0, %p0;"
        "add.u32 %r0, %r0, 1; st.global.u32 [%rd0], %r0;"
    )
    machine.launch(
        machine.load(entry(body, 1)),
        "kernel",
        grid=(64, 1, 1),
        block=(32, 1, 1),
        args=out.ctypes.data.to_bytes(8, "little"),
    )
    machine.run()
    assert out.tolist() == list(range(1, 65))


PING_PONG = """
KERNEL()(u32* own, u32* peer, u32 rank) {
    for (u32 turn = 0; turn < 10; ++turn) {
        if (turn % 2 == rank) {
            asm volatile("st.release.sys.global.u32 [%0], %1;"
                         :: "l"(peer), "r"(turn + 1) : "memory");
        } else {
            u32 seen;
            do asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                            : "=r"(seen) : "l"(own) : "memory");
            while (seen != turn + 1);
        }
    }
    own[1] = 7;
}
"""


def ranks_machine(seed: int, **options) -> tuple[Machine, list[np.ndarray]]:
    machine = Machine(seed=seed, **options)
    words = [np.zeros(2, np.uint32) for _ in range(2)]
    module = machine.load(ptx_of(PING_PONG, "sm_90a"))
    for rank in range(2):
        for owner in range(2):
            machine.add_memory(rank, words[owner].ctypes.data, 8, f"rank {owner}")
        machine.launch(
            module,
            "kernel",
            grid=(1, 1, 1),
            block=(1, 1, 1),
            args=pack_arguments((words[rank], words[1 - rank], rank)),
            rank=rank,
        )
    return machine, words


@pytest.mark.parametrize("clock", ["virtual", "real"])
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_exchange_through_memory(seed, clock):
    machine, words = ranks_machine(seed, clock=clock)
    machine.run()
    assert [w.tolist() for w in words] == [[10, 7], [9, 7]]


def test_a_seed_fixes_the_interleaving():
    def trace(seed: int) -> list[int]:
        order = np.zeros(65, np.uint32)
        run_kernel(
            "KERNEL()(u32* out) { if (threadIdx.x == 0) out[1 + atomicAdd(out, 1)] = blockIdx.x; }",
            order,
            ctas=64,
            threads=64,
            seed=seed,
        )
        return order[1:].tolist()

    assert trace(1) == trace(1)
    assert len({tuple(trace(seed)) for seed in range(5)}) == 5


def test_time_leaps_when_everything_waits():
    out = np.zeros(2, np.uint64)
    run_kernel(
        """
KERNEL()(u64* out, volatile u32* flag) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (*flag == 0 && now - start < 30000000000ull);
    out[0] = now - start;
    asm volatile("nanosleep.u32 1000;");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(out[1]));
    out[1] -= now;
}
""",
        out,
        np.zeros(1, np.uint32),
        threads=1,
    )
    assert 30e9 <= out[0] < 600e9
    assert 1000 <= out[1] < 1_000_000


def test_deadlock_says_who_waits_for_what():
    with pytest.raises(Deadlock) as caught:
        run_kernel(
            """
KERNEL()() {
    if (threadIdx.x < 32) asm volatile("barrier.cta.sync.aligned 3, 64;" ::: "memory");
    else asm volatile("barrier.cta.sync.aligned 4, 64;" ::: "memory");
}
""",
            ctas=2,
            threads=64,
        )
    text = str(caught.value)
    for line in (
        "kernel kernel, rank 0, CTA 0, warp 0 waits for barrier 3 (32 of 64 threads have arrived)",
        "and so do rank 0, CTA 1, warp 0",
        "kernel kernel, rank 0, CTA 0, warp 1 waits for barrier 4 (32 of 64 threads have arrived)",
        "source /kernel.cu:",
        "barrier.cta.sync.aligned 3, 64;",
    ):
        assert line in text


def test_polling_for_ever_is_a_deadlock_too():
    with pytest.raises(Deadlock, match=r"warps poll.*\n.*CTA 0, warp 0"):
        run_kernel(
            "KERNEL()(volatile u32* flag) { while (*flag == 0) {} }",
            np.zeros(1, np.uint32),
            threads=32,
        )


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (
            "barrier.cta.sync.aligned 1, 32; barrier.cta.arrive.aligned 1, 48;",
            BarrierMisuse,
            "multiple of 32",
        ),
        ("barrier.cluster.wait.aligned;", BarrierMisuse, "without an arrive"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", BarrierMisuse, "twice"),
        (
            "mov.u32 %r0, %laneid; setp.eq.u32 %c0, %r0, 0; @%c0 bar.sync 0;",
            InvalidOperation,
            "whole warp",
        ),
        ("bar.warp.sync 0xfffffffe;", InvalidOperation, "does not name the executing lane"),
        ("trap;", KernelTrap, "trap"),
        ("setmaxnreg.inc.sync.aligned.u32 24;", InvalidOperation, "the warp has 64 registers"),
    ],
)
def test_misuse_is_named(body, error, text):
    with pytest.raises(error, match=text):
        run_body(body, directives=".maxnreg 64")


def test_failed_assertions_say_what_and_where():
    source = """
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
KERNEL()() { if (threadIdx.x == 3) __assertfail("x > 0", "file.cu", 7, "kernel", 1); }
"""
    with pytest.raises(KernelTrap, match=r"assertion failed: x > 0 \(file\.cu:7\)\n.*lane 3"):
        run_kernel(source, threads=32)


def test_registers_move_between_warpgroups():
    body = """
mov.u32 %r0, %tid.x;
setp.lt.u32 %c0, %r0, 128;
@%c0 bra LESS;
setmaxnreg.inc.sync.aligned.u32 DEMAND;
bra DONE;
LESS:
setmaxnreg.dec.sync.aligned.u32 24;
DONE:
"""
    run_body(body.replace("DEMAND", "104"), threads=256, directives=".maxnreg 64")
    with pytest.raises(Deadlock, match="registers; the CTA's pool has"):
        run_body(body.replace("DEMAND", "112"), threads=256, directives=".maxnreg 64")


@pytest.mark.parametrize(
    ("statement", "error", "text"),
    [
        ("frobnicate.u32 %r0, %r1;", Unsupported, "unknown instruction 'frobnicate.u32'"),
        ("add.quickly.u32 %r0, %r1, %r2;", Unsupported, "modifier .quickly"),
        ("add.u32 %r0, %r1;", InvalidPtx, "expected 3 operands"),
        ("bra NOWHERE;", InvalidPtx, "no label 'NOWHERE'"),
        ("mov.u32 %r0, nothing;", InvalidPtx, "no variable 'nothing'"),
        ("add.u64 %r0, %rd1, %rd2;", InvalidPtx, "too narrow"),
        ("add.u32 %r0 %r1, %r2;", InvalidPtx, "expected ','"),
    ],
)
def test_bad_ptx_is_refused_when_it_is_loaded(statement, error, text):
    with pytest.raises(error, match=text) as caught:
        Machine().load(entry(statement, 0), name="bad.ptx")
    assert "bad.ptx: PTX line 6" in str(caught.value)
    assert statement in str(caught.value)


def test_bad_launches_are_refused():
    machine = Machine()
    module = machine.load(entry("", 1, directives=".reqntid 64\n.reqnctapercluster 2"))
    geometry = {"grid": (2, 1, 1), "block": (64, 1, 1), "args": bytes(8)}
    for change, text in (
        ({"block": (32, 1, 1)}, "the kernel requires 64"),
        ({"grid": (3, 1, 1)}, "not a multiple of cluster size 2"),
        ({"cluster": (4, 1, 1)}, "compiled for 2"),
        ({"args": bytes(4)}, "4 bytes of arguments; the kernel takes 8"),
        ({"args": [bytes(4)]}, "argument 0 of kernel: the parameter has 8 bytes, not 4"),
        ({"shared_bytes": 240_000}, "at most 232448"),
    ):
        with pytest.raises(LaunchError, match=text):
            machine.launch(module, "kernel", **{**geometry, **change})
    with pytest.raises(LaunchError, match=r"module .* has no kernel 'other'; it has\n  kernel"):
        machine.launch(module, "other", **geometry)
    with pytest.raises(InvalidPtx, match="no kernel"):
        machine.load(HEADER)


def test_progress_is_reported_and_may_stop_the_run():
    def stop(steps: int) -> None:
        assert steps > 0
        raise KeyboardInterrupt

    machine = Machine()
    machine.launch(
        machine.load(entry("AGAIN: add.u32 %r0, %r0, 1; bra AGAIN;", 0)),
        "kernel",
        grid=(1, 1, 1),
        block=(32, 1, 1),
    )
    with pytest.raises(KeyboardInterrupt):
        machine.run(progress=stop)
    assert machine.statistics.warp_instructions > 0


def test_the_listing_names_what_is_decoded():
    listing = supported_instructions()
    assert {"add", "cp.async.bulk.tensor", "tcgen05.mma", "mbarrier.try_wait"} <= set(listing)
    assert all(listing.values())


@pytest.mark.parametrize("schedule", ["slow_rank", "starved_role"])
@pytest.mark.parametrize("seed", range(4))
def test_time_does_not_pass_for_those_who_wait_for_a_starved_warp(schedule, seed):
    out = np.zeros(4, np.uint32)
    source = """
KERNEL()(volatile u32* flag, u32* gave_up) {
    u32 start, now;
    if (threadIdx.x == 32 * SEED) { flag[0] = 1; return; }
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(start));
    do {
        asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(now));
    } while (flag[0] == 0 && now - start < 20);  // 86 s
    if (flag[0] == 0) gave_up[threadIdx.x / 32] = 1;
}
"""
    machine = Machine(seed=seed, schedule=schedule)
    flag = np.zeros(1, np.uint32)
    for name, array in (("flag", flag), ("out", out)):
        machine.add_memory(0, array.ctypes.data, array.nbytes, name)
    machine.launch(
        machine.load(ptx_of(source.replace("SEED", str(seed)), "sm_100a")),
        "kernel",
        grid=(1, 1, 1),
        block=(128, 1, 1),
        args=pack_arguments((flag, out)),
    )
    machine.run()
    assert out.tolist() == [0, 0, 0, 0]


# What a warp does between two naps of 1 us, and what the one that waits for it does.
NAPPING = {
    "blind": "__nanosleep(1000);",
    "with polls": "__nanosleep(1000); if (flag[1]) break;",
}
WAITING = {
    "poll": "while (flag[0] == 0) {}",
    "poll and nap": "while (flag[0] == 0) __nanosleep(64);",
    "suspend": "wait(base, 0);",
    "an hour's patience": """
        u64 start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        while (flag[0] == 0 && now - start < 3600000000000ull);
        if (flag[0] == 0) flag[2] = 1;
    """,
}


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("napping", NAPPING)
@pytest.mark.parametrize("schedule", ["random", "starved_role"])
def test_time_does_not_leap_past_a_sleeper(schedule, napping, waiting):
    source = f"""
KERNEL()(volatile u32* flag) {{
    u32 base = shared_address(dynamic_shared);
    if (threadIdx.x == 0) init_barrier(base, 1);
    __syncthreads();
    if (threadIdx.x == 0) {{
        for (u32 i = 0; i < 2000; ++i) {{ {NAPPING[napping]} }}
        flag[0] = 1;
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(base) : "memory");
    }} else if (threadIdx.x % 32 == 0) {{
        {WAITING[waiting]}
    }}
}}
"""
    flag = np.zeros(4, np.uint32)
    machine = Machine(schedule=schedule)
    machine.add_array(flag, "flag")
    module = machine.load(ptx_of(source, "sm_100a"))
    machine.launch(
        module,
        "kernel",
        grid=(1, 1, 1),
        block=(96, 1, 1),
        shared_bytes=1024,
        args=[flag],
    )
    start_ns = machine.statistics.virtual_ns
    machine.run()
    assert flag.tolist() == [1, 0, 0, 0]
    assert 2_000_000 < machine.statistics.virtual_ns - start_ns < 20_000_000


def test_napping_between_polls_for_ever_is_a_deadlock_too():
    source = """
KERNEL()(volatile u32* flag) {
    if (threadIdx.x < 32) while (flag[0] == 0) __nanosleep(100);
    else while (flag[0] == 0) {}
}
"""
    with pytest.raises(Deadlock, match="nothing changed for over an hour"):
        run_kernel(source, np.zeros(1, np.uint32), threads=64)
