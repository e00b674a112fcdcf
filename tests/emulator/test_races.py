"""What the race detector calls a race, and what it takes for an order."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from warpcheck import Machine, RaceDetected, Uninitialized

from .device import aligned, pack_arguments, ptx_of, run_kernel

HAND_OVER = """
KERNEL()(u32* data, u32* flag, u32* out) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *data = 7;
        asm volatile("st.STORE.global.u32 [%0], 1;" :: "l"(flag) : "memory");
    }
    if (blockIdx.x == 1 && threadIdx.x == 0) {
        u32 seen = 0;
        while (!seen)
            asm volatile("ld.LOAD.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        *out = *data;
    }
}
"""


def hand_over(store: str, load: str) -> np.ndarray:
    data, flag, out = (np.zeros(4, np.uint32) for _ in range(3))
    source = HAND_OVER.replace("STORE", store).replace("LOAD", load)
    run_kernel(source, data, flag, out, ctas=2, threads=32)
    return out


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_release_and_acquire_order_two_ctas(scope: str) -> None:
    assert hand_over(f"release.{scope}", f"acquire.{scope}")[0] == 7


@pytest.mark.parametrize(
    ("store", "load"), [("relaxed.gpu", "acquire.gpu"), ("release.gpu", "relaxed.gpu")]
)
def test_half_an_order_is_a_race(store: str, load: str) -> None:
    with pytest.raises(RaceDetected, match=r"data race at byte 0 of 'array 0'.*\n  first: write"):
        hand_over(store, load)


RELAXED_HAND_OVER = """
KERNEL()(u32* data, u32* flag, u32* out, u32 role) {
    if (threadIdx.x != 0) return;
    if (role == 0) {
        *data = 7;
        asm volatile("WRITER_FENCE" ::: "memory");
        asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");
    } else {
        u32 seen = 0;
        while (!seen)
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        asm volatile("READER_FENCE" ::: "memory");
        *out = *data;
    }
}
"""


def hand_over_with_fences(writer: str, reader: str, *, num_ranks: int) -> int:
    """What the reader gets from the writer, two kernels of one rank or of two."""
    arrays = [np.zeros(4, np.uint32) for _ in range(3)]
    source = RELAXED_HAND_OVER
    for name, fence in (("WRITER_FENCE", writer), ("READER_FENCE", reader)):
        source = source.replace(name, f"{fence};" if fence else "")
    machine = Machine()
    module = machine.load(ptx_of(source, "sm_100a"))
    for role in range(2):
        rank = role % num_ranks
        if rank == role:
            for array, name in zip(arrays, ("data", "flag", "out"), strict=True):
                machine.add_memory(rank, array.ctypes.data, array.nbytes, name)
        machine.launch(
            module,
            "kernel",
            grid=(1, 1, 1),
            block=(32, 1, 1),
            args=pack_arguments((*arrays, role)),
            rank=rank,
        )
    machine.run()
    return int(arrays[2][0])


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("fence.acq_rel.sys", "fence.acq_rel.sys"),
        ("fence.release.sys", "fence.acquire.sys"),
        ("fence.sc.sys", "membar.sys"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fences_around_relaxed_accesses_order(writer: str, reader: str, num_ranks: int) -> None:
    assert hand_over_with_fences(writer, reader, num_ranks=num_ranks) == 7


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("", "fence.acquire.sys"),
        ("fence.release.sys", ""),
        ("fence.acquire.sys", "fence.acquire.sys"),
        ("fence.release.sys", "fence.release.sys"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_half_a_fence_pattern_is_a_race(writer: str, reader: str, num_ranks: int) -> None:
    with pytest.raises(RaceDetected, match="data race at byte 0 of 'data'"):
        hand_over_with_fences(writer, reader, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("fence.release.gpu", "fence.acquire.sys"), ("fence.release.sys", "fence.acquire.gpu")],
)
def test_fences_must_reach_the_other_rank(writer: str, reader: str) -> None:
    assert hand_over_with_fences(writer, reader, num_ranks=1) == 7
    with pytest.raises(RaceDetected, match="data race at byte 0 of 'data'"):
        hand_over_with_fences(writer, reader, num_ranks=2)


NARROW_HAND_OVER = """
KERNEL()(u32* data, u32* flag, u32* out) {
    const bool writes = threadIdx.x == 0 && blockIdx.x == 0;
    const bool reads = READER;
    if (writes) {
        *data = 7;
        asm volatile("WRITER_FENCE;" ::: "memory");
        asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
    }
    if (reads) {
        u32 seen = 0;
        while (!seen)
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        asm volatile("READER_FENCE;" ::: "memory");
        *out = *data;
    }
}
"""
SAME_CTA = "blockIdx.x == 0 && threadIdx.x == 32"
OTHER_CTA = "blockIdx.x == 1 && threadIdx.x == 0"
CTA_FENCE, GPU_FENCE = "fence.acq_rel.cta", "fence.acq_rel.gpu"


@pytest.mark.parametrize(
    ("reader", "writer_fence", "reader_fence", "is_race"),
    [
        (SAME_CTA, CTA_FENCE, CTA_FENCE, False),
        (SAME_CTA, GPU_FENCE, CTA_FENCE, False),
        (SAME_CTA, CTA_FENCE, GPU_FENCE, False),
        (OTHER_CTA, GPU_FENCE, GPU_FENCE, False),
        (OTHER_CTA, CTA_FENCE, GPU_FENCE, True),
        (OTHER_CTA, GPU_FENCE, CTA_FENCE, True),
        # A narrow fence takes nothing from a wide one.
        (OTHER_CTA, f"{GPU_FENCE}; {CTA_FENCE}", f"{CTA_FENCE}; {GPU_FENCE}", False),
    ],
)
def test_fences_must_reach_the_other_cta(
    reader: str, writer_fence: str, reader_fence: str, is_race: bool
) -> None:
    source = NARROW_HAND_OVER.replace("READER_FENCE", reader_fence)
    source = source.replace("WRITER_FENCE", writer_fence).replace("READER", reader)
    data, flag, out = (np.zeros(4, np.uint32) for _ in range(3))
    if is_race:
        with pytest.raises(RaceDetected, match="data race at byte 0 of 'array 0'"):
            run_kernel(source, data, flag, out, ctas=2, threads=64)
    else:
        run_kernel(source, data, flag, out, ctas=2, threads=64)
        assert out[0] == 7


SHARED = """
KERNEL()(u32* out) {
    u32* words = (u32*)dynamic_shared;
    words[threadIdx.x] = threadIdx.x;
    ORDER
    out[threadIdx.x] = words[threadIdx.x ^ OTHER];
}
"""


@pytest.mark.parametrize(
    ("order", "other", "is_race"),
    [
        ("__syncthreads();", 32, False),
        ("__syncwarp();", 32, True),
        ("__syncwarp();", 1, False),
        ('asm volatile("" ::: "memory");', 1, True),
    ],
)
def test_shared_memory_between_warps_and_lanes(order: str, other: int, is_race: bool) -> None:
    source = SHARED.replace("ORDER", order).replace("OTHER", str(other))
    out = np.zeros(64, np.uint32)
    if is_race:
        # Another warp may not have written at all yet.
        with pytest.raises((RaceDetected, Uninitialized), match="shared offset 0x4"):
            run_kernel(source, out, threads=64)
    else:
        run_kernel(source, out, threads=64)
        assert (out == (np.arange(64) ^ other)).all()


def test_bytes_of_one_word_are_told_apart() -> None:
    source = "KERNEL()(u8* out) { out[threadIdx.x / 32] = threadIdx.x / 32 + 1; }"
    out = np.zeros(16, np.uint8)
    run_kernel(source, out, threads=128)
    assert out[:4].tolist() == [1, 2, 3, 4]


BULK_READ = """
KERNEL()(u32* data, u32* flag, u32* out) {
    u32 base = shared_address(dynamic_shared);
    if (blockIdx.x == 0 && threadIdx.x < 4) {
        data[threadIdx.x] = 7;
        __syncwarp(15);
        if (threadIdx.x == 0)
            asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
    }
    if (blockIdx.x == 1 && threadIdx.x == 0) {
        init_barrier(base + 64, 1);
        u32 seen = 0;
        while (!seen)
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                : "=r"(seen) : "l"(flag) : "memory");
        FENCE
        expect_bytes(base + 64, 16);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 16, [%2];" :: "r"(base), "l"(data), "r"(base + 64) : "memory");
        wait(base + 64, 0);
        *out = ((u32*)dynamic_shared)[1];
    }
}
"""


@pytest.mark.parametrize("space", ["", ".global"])
def test_bulk_copy_of_what_another_cta_wrote_after_a_fence(space: str) -> None:
    data, flag, out = (aligned(np.zeros(4, np.uint32)) for _ in range(3))
    fence = f'asm volatile("fence.proxy.async{space};" ::: "memory");'
    run_kernel(BULK_READ.replace("FENCE", fence), data, flag, out, ctas=2, threads=32)
    assert out[0] == 7


@pytest.mark.parametrize("fence", ["", "fence_async();"])
def test_bulk_copy_without_a_fence_for_global_memory_is_a_race(fence: str) -> None:
    data, flag, out = (aligned(np.zeros(4, np.uint32)) for _ in range(3))
    with pytest.raises(RaceDetected, match=r"no fence\.proxy\.async stands between"):
        run_kernel(BULK_READ.replace("FENCE", fence), data, flag, out, ctas=2, threads=32)


READ_ONLY = """
KERNEL()(u32* data, u32* flag, u32* out) {
    if (WRITES) data[0] = 7;
    __syncthreads();
    u32 value;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(data));
    out[threadIdx.x] = value;
}
"""


def test_the_read_only_path_is_for_what_nobody_writes_meanwhile() -> None:
    arrays = [np.zeros(32, np.uint32) for _ in range(3)]
    run_kernel(READ_ONLY.replace("WRITES", "false"), *arrays, threads=32)
    with pytest.raises(RaceDetected, match=r"'array 0'.*ld\.global\.nc reads what is written"):
        run_kernel(READ_ONLY.replace("WRITES", "threadIdx.x == 0"), *arrays, threads=32)


LATER_KERNEL = """
KERNEL()(u32* data, u32* flag, u32* out, u32 role) {
    if (threadIdx.x != 0) return;
    u32* own = data + blockIdx.x;
    if (role == 0) *own = 7;                      // each CTA of the first kernel
    if (role == 1) out[blockIdx.x] = data[1 - blockIdx.x];  // the other CTA of the second
}
"""


@pytest.mark.parametrize("in_order", [True, False])
def test_a_kernel_that_follows_another_sees_all_of_it(in_order: bool) -> None:
    data, flag, out = (np.zeros(4, np.uint32) for _ in range(3))
    machine = Machine()
    module = machine.load(ptx_of(LATER_KERNEL, "sm_100a"))
    for array, name in ((data, "data"), (flag, "flag"), (out, "out")):
        machine.add_memory(0, array.ctypes.data, array.nbytes, name)
    for role in range(2):
        machine.launch(
            module,
            "kernel",
            grid=(2, 1, 1),
            block=(32, 1, 1),
            args=pack_arguments((data, flag, out, role)),
            in_order=in_order,
        )
    if in_order:
        machine.run()
        assert out.tolist() == [7, 7, 0, 0]
    else:
        with pytest.raises(RaceDetected, match="of 'data'"):
            machine.run()


LANES_BY_MBARRIER = """
KERNEL()(u32* out) {
    u32* words = (u32*)dynamic_shared;
    u32 barrier = shared_address(dynamic_shared) + 1024, lane = threadIdx.x;
    if (lane == 0) init_barrier(barrier, COUNT);
    __syncwarp();
    words[lane] = 3 * lane;
    if (lane < COUNT)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
    wait(barrier, 0);
    if (lane < 16) out[lane] = words[lane + 16];
}
"""


BY_A_BARRIER = """
KERNEL()(u32* out) {
    u32* const data = (u32*)dynamic_shared;
    __shared__ alignas(8) u64 barrier;
    const u32 at = u32(__cvta_generic_to_shared(&barrier));
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at) : "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        *data = 7;
        asm volatile("ARRIVE" :: "r"(at) : "memory");
    } else if (threadIdx.x == 32) {
        u32 done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parityWAIT.shared::cta.b64 p, [%1], 0;"
                         " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at) : "memory");
        asm volatile("FENCE" ::: "memory");
        *out = *data;
    }
}
"""
ARRIVES = "mbarrier.arrive{order}.shared::cta.b64 _, [%0];"
FENCES = "fence.acq_rel.cta;"


@pytest.mark.parametrize(
    ("arrival", "wait", "fence", "is_race"),
    [
        (ARRIVES.format(order=""), "", "", False),
        (ARRIVES.format(order=".relaxed.cta"), "", "", True),
        (FENCES + ARRIVES.format(order=".relaxed.cta"), "", "", False),
        (ARRIVES.format(order=""), ".relaxed.cta", "", True),
        (ARRIVES.format(order=""), ".relaxed.cta", FENCES, False),
        (FENCES + ARRIVES.format(order=".relaxed.cta"), ".relaxed.cta", FENCES, False),
    ],
)
def test_relaxed_arrivals_and_waits_need_fences(
    arrival: str, wait: str, fence: str, is_race: bool
) -> None:
    source = BY_A_BARRIER.replace("ARRIVE", arrival).replace("WAIT", wait).replace("FENCE", fence)
    out = np.zeros(4, np.uint32)
    with (
        pytest.raises(RaceDetected, match="data race at shared offset")
        if is_race
        else nullcontext()
    ):
        run_kernel(source, out, threads=64)
    assert is_race or out[0] == 7


def test_lanes_that_arrived_are_ordered_for_those_that_wait() -> None:
    out = np.zeros(16, np.uint32)
    run_kernel(LANES_BY_MBARRIER.replace("COUNT", "32"), out, threads=32)
    assert (out == 3 * np.arange(16, 32)).all()


# ---- lanes of one warp

ONE_STORE = """
KERNEL()(u32* out) {
    const u32 lane = threadIdx.x;
    u32* const words = (u32*)dynamic_shared;
    BODY
}
"""


@pytest.mark.parametrize(
    "body",
    [
        "out[lane % 31] = lane;",
        "words[lane & 7] = lane;",
        "if (lane % 2) words[0] = lane;",
        "((uint2*)out)[lane / 2] = make_uint2(0, lane % 2);",
        "((u8*)out)[lane ^ lane % 2] = u8(lane);",
    ],
)
def test_lanes_that_store_different_values_to_one_place(body: str) -> None:
    with pytest.raises(RaceDetected) as caught:
        run_kernel(ONE_STORE.replace("BODY", body), np.zeros(64, np.uint32), threads=32)
    text = str(caught.value)
    assert "lanes store different values by one instruction" in text
    assert text.count("\n  first: write by") == text.count("\n  then: write by") == 1


@pytest.mark.parametrize(
    "body",
    [
        "out[lane / 2] = lane / 2;",
        "words[0] = 7;",
        "if (lane % 2) words[lane / 8] = lane / 8;",
        "u32 own[4]; own[out[40]] = lane; out[lane] = own[out[41]];",  # local memory
        "((volatile u32*)out)[0] = lane;",  # one after the other
    ],
)
def test_lanes_may_store_one_value_to_one_place(body: str) -> None:
    run_kernel(ONE_STORE.replace("BODY", body), np.zeros(64, np.uint32), threads=32)


LANES = """
#define RELEASE(word) \\
    asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(word) : "memory")
#define RELAXED(word) \\
    asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(word) : "memory")
#define FENCE asm volatile("fence.acq_rel.gpu;" ::: "memory")
__device__ void acquire(u32* word) {
    u32 seen = 0;
    while (!seen)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
}
KERNEL()(u32* data, u32* flags, u32* out) {
    const u32 lane = threadIdx.x;
    if (blockIdx.x == 0) {
        data[lane] = lane;
        PRODUCE
    } else {
        CONSUME
        out[lane] = data[lane];
    }
}
"""
ALL_ACQUIRE = "acquire(flags); __syncwarp();"
POLL = """
    if (lane == 3) {
        u32 seen = 0;
        while (!seen)
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                : "=r"(seen) : "l"(flags) : "memory");
    }
    __syncwarp();
"""


def run_lanes_of_two_ctas(produce: str, consume: str = ALL_ACQUIRE) -> None:
    data, flags, out = (np.zeros(32, np.uint32) for _ in range(3))
    source = LANES.replace("PRODUCE", produce).replace("CONSUME", consume)
    run_kernel(source, data, flags, out, ctas=2, threads=32)
    assert (out == np.arange(32)).all()


@pytest.mark.parametrize(
    ("produce", "consume"),
    [
        ("__syncwarp(); if (lane == 0) RELEASE(flags);", ALL_ACQUIRE),
        (
            "__syncwarp(); if (lane == 9) RELEASE(flags);",
            "if (lane == 3) acquire(flags); __syncwarp();",
        ),
        # Each lane for itself.
        ("RELEASE(flags + lane);", "acquire(flags + lane);"),
        ("__syncwarp(); if (lane == 0) { FENCE; RELAXED(flags); }", ALL_ACQUIRE),
        ("FENCE; RELAXED(flags + lane);", "acquire(flags + lane);"),
        ("__syncwarp(); FENCE; if (lane == 5) RELAXED(flags);", ALL_ACQUIRE),
        # Lane 3 has read the flag and fences; the others wait for it.
        ("__syncwarp(); if (lane == 0) RELEASE(flags);", POLL + "FENCE; __syncwarp();"),
        # Lanes 0..15 and 16..31 are brought together apart.
        (
            "__syncwarp(lane < 16 ? 0xffff : 0xffff0000);"
            "if (lane % 16 == 0) RELEASE(flags + lane);",
            "acquire(flags); acquire(flags + 16);",
        ),
    ],
)
def test_what_one_lane_releases(produce: str, consume: str) -> None:
    run_lanes_of_two_ctas(produce, consume)


@pytest.mark.parametrize(
    ("produce", "consume"),
    [
        # The other lanes' writes are not its own,
        ("if (lane == 0) RELEASE(flags);", ALL_ACQUIRE),
        ("FENCE; if (lane == 0) RELAXED(flags);", ALL_ACQUIRE),
        ("if (lane == 0) { FENCE; __syncwarp(1); RELAXED(flags); }", ALL_ACQUIRE),
        ("if (lane == 0) FENCE; __syncwarp(); if (lane == 0) RELAXED(flags);", ALL_ACQUIRE),
        (
            "__syncwarp(lane < 16 ? 0xffff : 0xffff0000); if (lane == 0) RELEASE(flags);",
            ALL_ACQUIRE,
        ),
        # and what it acquires is not theirs.
        ("__syncwarp(); if (lane == 0) RELEASE(flags);", "if (lane == 0) acquire(flags);"),
        (
            "__syncwarp(); if (lane == 0) RELEASE(flags);",
            "if (lane == 0) acquire(flags); if (lane < 16) __syncwarp(0xffff);",
        ),
        ("RELEASE(flags + lane);", "acquire(flags + (lane ^ 1));"),
        # A fence and the access that it belongs to are of one thread.
        (
            "__syncwarp(); if (lane == 0) FENCE; __syncwarp(); if (lane == 1) RELAXED(flags);",
            ALL_ACQUIRE,
        ),
        (
            "__syncwarp(); if (lane == 0) RELEASE(flags);",
            POLL + "if (lane != 3) FENCE; __syncwarp();",
        ),
    ],
)
def test_lanes_need_a_syncwarp_around_it(produce: str, consume: str) -> None:
    with pytest.raises(RaceDetected, match="data race at byte"):
        run_lanes_of_two_ctas(produce, consume)


OVERWRITE = """
KERNEL()(u32* data, u32* out) {
    u32 base = shared_address(dynamic_shared);
    u32* words = (u32*)dynamic_shared;
    if (threadIdx.x == 0) { init_barrier(base + 512, 1); init_barrier(base + 520, 1); }
    words[threadIdx.x] = threadIdx.x;
    fence_async();
    __syncthreads();
    if (threadIdx.x < 32) {
        out[threadIdx.x] = words[threadIdx.x];
        BETWEEN
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(base + 512) : "memory");
    } else if (threadIdx.x == 32) {
        wait(base + 512, 0);
        expect_bytes(base + 520, 128);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 128, [%2];" :: "r"(base), "l"(data), "r"(base + 520) : "memory");
        wait(base + 520, 0);
    }
}
"""


@pytest.mark.parametrize(
    ("between", "is_race"),
    [
        ("__syncwarp();", False),
        # Whatever brings the warp together is enough for reads, as in CUTLASS's main loops.
        ("out[threadIdx.x] += __shfl_xor_sync(~0u, out[threadIdx.x], 1);", False),
        ("", True),
    ],
)
def test_one_lane_frees_what_its_warp_has_read(between: str, is_race: bool) -> None:
    data, out = aligned(np.zeros(64, np.uint32)), np.zeros(32, np.uint32)
    source = OVERWRITE.replace("BETWEEN", between)
    if is_race:
        with pytest.raises(RaceDetected, match=r"first: read by.*warp 0"):
            run_kernel(source, data, out, threads=64)
    else:
        run_kernel(source, data, out, threads=64)


COPIES_OF_ONE_PLACE = """
KERNEL()(u32* data) {
    u32 base = shared_address(dynamic_shared), barrier = base + 512;
    if (threadIdx.x == 0) {
        init_barrier(barrier, 1);
        for (u32 copy = 0; copy < 2; ++copy) {
            if (copy == 0 || !IN_ONE_PHASE) expect_bytes(barrier, IN_ONE_PHASE ? 256 : 128);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                " [%0], [%1], 128, [%2];"
                :: "r"(base + copy * DISTANCE), "l"(data), "r"(barrier) : "memory");
            if (!IN_ONE_PHASE) wait(barrier, copy);
        }
        if (IN_ONE_PHASE) wait(barrier, 0);
    }
}
"""


@pytest.mark.parametrize(
    ("in_one_phase", "distance", "is_race"),
    [(True, 128, False), (True, 64, True), (True, 0, True), (False, 0, False)],
    ids=["side by side", "overlapping", "one place", "one place after a wait"],
)
def test_copies_that_one_phase_counts_come_in_no_order(
    in_one_phase: bool, distance: int, is_race: bool
) -> None:
    data = aligned(np.zeros(64, np.uint32))
    source = COPIES_OF_ONE_PLACE.replace("IN_ONE_PHASE", str(int(in_one_phase)))
    source = source.replace("DISTANCE", str(distance))
    expected = (
        pytest.raises(RaceDetected, match="nothing orders them") if is_race else nullcontext()
    )
    with expected:
        run_kernel(source, data)


REFILL = """
KERNEL()(u32* data) {
    u32 base = shared_address(dynamic_shared), full = base + 512, told = base + 520;
    if (threadIdx.x == 0) { init_barrier(full, 1); init_barrier(told, 1); }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        if (threadIdx.x == 32) {
            BEFORE
        }
        expect_bytes(full, 128);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 128, [%2];" :: "r"(base), "l"(data), "r"(full) : "memory");
        if (threadIdx.x == 0) {
            wait(full, 0);
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(told) : "memory");
        } else {
            wait(full, 1);
        }
    }
}
"""
# The second warp comes late, so that the first phase is over in any case.
LATE = 'u64 now, end = 0; do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));'
LATE += " if (!end) end = now + 20000; } while (now < end);"


@pytest.mark.parametrize(
    ("before", "is_race"), [("wait(told, 0);", False), (LATE, True)], ids=["told", "late"]
)
def test_a_refill_follows_who_saw_the_copy_before(before: str, is_race: bool) -> None:
    data = aligned(np.zeros(64, np.uint32))
    expected = (
        pytest.raises(RaceDetected, match="nothing orders them") if is_race else nullcontext()
    )
    with expected:
        run_kernel(REFILL.replace("BEFORE", before), data, threads=64)


STORE = """
KERNEL()(u32* data) {
    u32 base = shared_address(dynamic_shared);
    ((u32*)dynamic_shared)[threadIdx.x] = 5;
    BEFORE
    if (threadIdx.x == 0) {
        AFTER
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;"
            :: "l"(data), "r"(base) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
"""


@pytest.mark.parametrize(
    ("before", "after", "is_race"),
    [
        ("fence_async(); __syncwarp();", "", False),
        ("__syncwarp();", "fence_async();", False),
        ("__syncwarp(); fence_async();", "", False),
        ("fence_async();", "", True),
        ("if (threadIdx.x == 0) fence_async(); __syncwarp();", "", True),
        ("if (threadIdx.x < 16) fence_async(); __syncwarp();", "", True),
    ],
)
def test_a_proxy_fence_is_for_what_is_ordered_before_its_thread(
    before: str, after: str, is_race: bool
) -> None:
    data = aligned(np.zeros(32, np.uint32))
    source = STORE.replace("BEFORE", before).replace("AFTER", after)
    if is_race:
        with pytest.raises(RaceDetected):
            run_kernel(source, data, threads=32)
    else:
        run_kernel(source, data, threads=32)
        assert (data == 5).all()


USES_BARRIER = """
KERNEL()(u32* out) {
    u32 base = shared_address(dynamic_shared);
    if (threadIdx.x == 0) init_barrier(base, 1);
    BETWEEN
    if (threadIdx.x == 1)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(base) : "memory");
    wait(base, 0);
}
"""


@pytest.mark.parametrize("between", ["__syncwarp();", ""])
def test_another_lane_uses_a_barrier_after_a_syncwarp(between: str) -> None:
    source = USES_BARRIER.replace("BETWEEN", between)
    if between:
        run_kernel(source, np.zeros(1, np.uint32), threads=32)
    else:
        with pytest.raises(RaceDetected, match=r"no barrier orders this after its mbarrier\.init"):
            run_kernel(source, np.zeros(1, np.uint32), threads=32)


def test_atomics_of_too_narrow_a_scope() -> None:
    source = """
KERNEL()(u32* count) {
    asm volatile("red.relaxed.cta.global.add.u32 [%0], 1;" :: "l"(count) : "memory");
}
"""
    run_kernel(source, np.zeros(1, np.uint32), ctas=1, threads=64)
    with pytest.raises(RaceDetected, match="the scope of one of them does not reach the other"):
        run_kernel(source, np.zeros(1, np.uint32), ctas=2, threads=32)


# Warp 0 writes 32 elements side by side, warp 1 reads 32, the first of which is the last of these.
ROWS = """
KERNEL()(ELEMENT* memory, ELEMENT* out) {
    PLACE
    if (threadIdx.x < 32) row[threadIdx.x] = memory[32 + threadIdx.x % 32];
    BETWEEN
    if (threadIdx.x >= 32) out[threadIdx.x - 32] = row[threadIdx.x - 1];
}
"""
ROW_ELEMENTS = {"u32": 4, "u64": 8, "uint4": 16, "uchar4": 4, "short": 2}


@pytest.mark.parametrize("element", ROW_ELEMENTS)
@pytest.mark.parametrize("place", ["global", "shared"])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_accesses_side_by_side_race_where_they_overlap(element, place, is_ordered):
    size = ROW_ELEMENTS[element]
    # The row lies across the end of a page.
    memory = aligned(np.zeros(4096, np.uint8), 4096)
    memory[:] = np.random.default_rng(size).integers(1, 255, 4096)
    region = aligned(np.zeros(2 * 4096, np.uint8), 4096)
    out = np.zeros(32 * size, np.uint8)
    first = 4096 - 16 * size
    where = {
        "global": f"ELEMENT* row = (ELEMENT*)((u8*)region + {first});",
        "shared": "ELEMENT* row = (ELEMENT*)dynamic_shared;"
        "row[threadIdx.x] = memory[threadIdx.x]; __syncthreads();",
    }[place]
    source = ROWS.replace("KERNEL()(ELEMENT* memory,", "KERNEL()(u8* region, ELEMENT* memory,")
    source = source.replace("PLACE", where)
    source = source.replace("BETWEEN", "__syncthreads();" if is_ordered else "")
    findings = run_kernel(
        source.replace("ELEMENT", element),
        region,
        memory,
        out,
        threads=64,
        stop_at_findings=False,
    )
    if is_ordered:
        assert not findings
        written = memory[32 * size : 64 * size]
        assert np.array_equal(out[:size], written[31 * size :])
        if place == "global":
            assert np.array_equal(region[first : first + 32 * size], written)
        return
    (race,) = findings
    assert {one.lane for one in race.involved} == {0, 31}
    if place == "global":
        assert 0 <= race.address - region.ctypes.data - (first + 31 * size) < size
    else:
        assert 0 <= race.address - 1024 - 31 * size < size


# ---- rows of lanes: what one warp touches together, and another one otherwise

TWO_ROWS = """
template <class T> __device__ void touch(u32* data, int first, int stores) {
    T* at = reinterpret_cast<T*>(data + first) + threadIdx.x % 32;
    if (stores) {
        T value = {};
        *at = value;
    } else {
        volatile u32 kept = *reinterpret_cast<u32*>(at);
        T value = *at;
        asm volatile("" :: "r"(reinterpret_cast<u32&>(value)) : "memory");
    }
}
__device__ void row(u32* data, int first, int words, int stores) {
    if (words == 1) touch<u32>(data, first, stores);
    if (words == 2) touch<uint2>(data, first, stores);
    if (words == 4) touch<uint4>(data, first, stores);
}
KERNEL()(u32* global, int in_shared, int first, int words, int second, int more, int ordered) {
    u32* data = in_shared ? (u32*)dynamic_shared : global;
    for (int i = threadIdx.x; i < 512; i += 64) data[i] = i;
    __syncthreads();
    if (threadIdx.x < 32) row(data, first, words, 1);
    if (ordered) __syncthreads();
    if (threadIdx.x >= 32) row(data, second, more, 0);
    __syncthreads();
    if (threadIdx.x < 32) row(data, second, more, 1);
    if (ordered) __syncthreads();
    if (threadIdx.x == 63 && ordered) data[second + 5] = 1;
}
"""


@pytest.mark.parametrize("in_shared", [0, 1])
@pytest.mark.parametrize(
    ("first", "words", "second", "more"),
    [
        (0, 1, 0, 1),
        (0, 1, 31, 1),
        (0, 1, 32, 1),
        (4, 1, 36, 1),
        (4, 1, 35, 1),
        (4, 1, 3, 1),
        (4, 4, 4, 4),
        (4, 4, 132, 4),
        (4, 4, 128, 4),
        (2, 2, 0, 4),
        (6, 2, 70, 1),
        (6, 2, 69, 1),
        (64, 1, 96, 2),
        (65, 1, 96, 2),
        (65, 1, 34, 2),
    ],
)
def test_rows_of_lanes_race_where_they_overlap(
    in_shared: int, first: int, words: int, second: int, more: int
) -> None:
    overlap = first < second + 32 * more and second < first + 32 * words
    # NumPy's arrays start anywhere in 128 bytes.
    for shift in (0, 4):
        data = aligned(np.zeros(520, np.uint32))[shift : shift + 512]
        arguments = (data, in_shared, first, words, second, more)
        assert run_kernel(TWO_ROWS, *arguments, 1, threads=64, stop_at_findings=False) == []
        findings = run_kernel(TWO_ROWS, *arguments, 0, threads=64, stop_at_findings=False)
        assert {finding.kind for finding in findings} == ({"race"} if overlap else set())
