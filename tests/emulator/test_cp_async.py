"""cp.async and its groups: a pipelined GEMM by mma.sync, and what is found without a wait."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from warpcheck import (
    BarrierMisuse,
    InvalidOperation,
    InvalidPtx,
    Misaligned,
    RaceDetected,
    Uninitialized,
)

from .device import run_kernel
from .raw_ptx import run_body

# C = A * B^T with A [64, K] and B [32, K] row-major; 4 warps of 16 rows. Two stages of 32 bytes of
# K per row: while one is multiplied, the next one is on its way.
GEMM = """
KERNEL()(const u8* a, const u8* b, RESULT* c, u32 row_bytes) {
    constexpr u32 stage_bytes = (64 + 32) * 32;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, base = shared_address(dynamic_shared);
    u32 steps = row_bytes / 32;
    RESULT sums[4][4] = {};
    auto load = [&](u32 step) {
        for (u32 i = threadIdx.x; i < 96 * 2; i += 128) {
            u32 row = i / 2, half = i % 2;
            const u8* from = (row < 64 ? a + row * row_bytes : b + (row - 64) * row_bytes)
                             + step * 32 + half * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                :: "r"(base + step % 2 * stage_bytes + row * 32 + half * 16), "l"(from) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    load(0);
    for (u32 step = 0; step < steps; ++step) {
        if (step + 1 < steps) load(step + 1);
        else asm volatile("cp.async.commit_group;" ::: "memory");
        WAIT
        BARRIER
        u32 at = base + step % 2 * stage_bytes, fa[4], fb[2];
        u32 row = warp * 16 + lane % 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3])
            : "r"(at + row * 32 + lane / 16 * 16) : "memory");
        for (u32 n = 0; n < 4; ++n) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                : "=r"(fb[0]), "=r"(fb[1])
                : "r"(at + (64 + n * 8 + lane % 8) * 32 + lane / 8 % 2 * 16) : "memory");
            asm volatile("mma.sync.aligned.SHAPE {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
                " {%0, %1, %2, %3};"
                : "+CONSTRAINT"(sums[n][0]), "+CONSTRAINT"(sums[n][1]), "+CONSTRAINT"(sums[n][2]),
                  "+CONSTRAINT"(sums[n][3])
                : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
        }
        __syncthreads();
    }
    for (u32 n = 0; n < 4; ++n)
        for (u32 i = 0; i < 4; ++i)
            c[(warp * 16 + lane / 4 + i / 2 * 8) * 32 + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
}
"""
WAIT = 'asm volatile("cp.async.wait_group 1;" ::: "memory");'
TYPES = {
    "f16": (torch.float16, "m16n8k16.row.col.f32.f16.f16.f32"),
    "bf16": (torch.bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32"),
    "tf32": (torch.float32, "m16n8k8.row.col.f32.tf32.tf32.f32"),
    "s8": (torch.int8, "m16n8k32.row.col.s32.s8.s8.s32"),
    "u8": (torch.uint8, "m16n8k32.row.col.s32.u8.u8.s32"),
    "e4m3": (torch.float8_e4m3fn, "m16n8k32.row.col.f32.e4m3.e4m3.f32"),
}


def multiply(
    name: str, *, k: int = 128, wait: str = WAIT, barrier: str = "__syncthreads();", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    dtype, shape = TYPES[name]
    low = 0 if name == "u8" else -4
    rng = np.random.default_rng(seed)
    a, b = (torch.from_numpy(rng.integers(low, 5, (rows, k))) for rows in (64, 32))
    integers = name in ("s8", "u8")
    out = np.zeros((64, 32), np.int32 if integers else np.float32)
    source = GEMM.replace("WAIT", wait).replace("BARRIER", barrier).replace("SHAPE", shape)
    source = source.replace("RESULT", "int" if integers else "float")
    operands = [x.to(dtype).view(torch.uint8).numpy() for x in (a, b)]
    run_kernel(
        source.replace("CONSTRAINT", "r" if integers else "f"),
        *operands,
        out,
        operands[0].shape[1],
        seed=seed,
    )
    return out, (a @ b.T).numpy()


@pytest.mark.parametrize("name", TYPES)
def test_pipelined_gemm(name):
    out, expected = multiply(name)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("seed", range(4))
def test_schedules(seed):
    out, expected = multiply("f16", k=192, seed=seed)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("wait", "barrier"),
    [
        ("", "__syncthreads();"),
        ('asm volatile("cp.async.wait_group 2;" ::: "memory");', "__syncthreads();"),
        (WAIT, ""),
    ],
)
def test_a_missing_wait_or_barrier_is_found(wait, barrier):
    with pytest.raises((RaceDetected, Uninitialized)):
        multiply("f16", wait=wait, barrier=barrier)


ARRIVAL = """
KERNEL()(const u32* in, u32* out) {
    __shared__ u32 words[128];
    __shared__ u64 barrier;
    u32 at = shared_address(&barrier);
    if (threadIdx.x == 0) init_barrier(at, COUNT);
    __syncthreads();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        :: "r"(shared_address(&words[threadIdx.x])), "l"(in + threadIdx.x) : "memory");
    ARRIVE
    wait(at, 0);
    out[threadIdx.x] = words[threadIdx.x ^ 64];
}
"""
NOTHING_LEFT = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");'


def arrival(form: str) -> str:
    return f'asm volatile("cp.async.mbarrier.arrive{form}.shared::cta.b64 [%0];" :: "r"(at));'


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["", ".noinc"])
def test_copies_arrive_at_an_mbarrier(form, seed):
    """.noinc is one of the counted arrivals; without it, it adds one that it makes itself."""
    values, out = np.arange(128, dtype=np.uint32) + 5, np.zeros(128, np.uint32)
    arrive = arrival(form) + ("" if form else NOTHING_LEFT)
    run_kernel(ARRIVAL.replace("ARRIVE", arrive).replace("COUNT", "128"), values, out, seed=seed)
    assert (out == values[np.arange(128) ^ 64]).all()


def test_wrong_counts_and_missing_arrivals_are_found():
    values, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    for arrive, count in ((arrival(".noinc"), "64"), (NOTHING_LEFT, "128")):
        source = ARRIVAL.replace("ARRIVE", arrive).replace("COUNT", count)
        with pytest.raises((BarrierMisuse, RaceDetected, Uninitialized)):
            run_kernel(source, values, out)


def test_source_size_and_alignment():
    source = """
KERNEL()(const u32* in, u32* out, u32 offset) {
    u32 to = shared_address(dynamic_shared) + threadIdx.x * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"((const u8*)in + threadIdx.x * 16 + offset), "r"(threadIdx.x * 4)
        : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (u32 i = threadIdx.x * 4; i < threadIdx.x * 4 + 4; ++i) out[i] = ((u32*)dynamic_shared)[i];
}
"""
    values, out = np.arange(1, 21, dtype=np.uint32), np.zeros(16, np.uint32)
    run_kernel(source, values, out, 0, threads=4)
    expected = values[:16].reshape(4, 4) * (np.arange(4) < np.arange(4)[:, None])
    assert (out.reshape(4, 4) == expected).all()
    with pytest.raises(Misaligned, match=r"cp\.async of 16 bytes"):
        run_kernel(source, values, out, 4, threads=4)


PIPELINE = """
// Warp 0 copies rows into two stages, warp 1 reads them: full and empty mbarriers, no other order.
KERNEL()(const u32* in, u32* out, u32 rows) {
    __shared__ u32 stages[2][32];
    __shared__ u64 full[2], empty[2];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < 2) {
        init_barrier(shared_address(&full[threadIdx.x]), 32);
        init_barrier(shared_address(&empty[threadIdx.x]), 32);
    }
    __syncthreads();
    for (u32 row = 0; row < rows; ++row) {
        u32 stage = row % 2, phase = row / 2 % 2;
        u32 at_full = shared_address(&full[stage]), at_empty = shared_address(&empty[stage]);
        if (warp == 0) {
            WAIT_EMPTY
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                :: "r"(shared_address(&stages[stage][lane])), "l"(in + row * 32 + lane) : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at_full));
        } else {
            wait(at_full, phase);
            out[row * 32 + lane] = stages[stage][31 - lane];
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at_empty) : "memory");
        }
    }
    if (warp == 0) asm volatile("cp.async.wait_all;" ::: "memory");
}
"""


@pytest.mark.parametrize("seed", range(3))
def test_stages_handed_on_by_mbarriers(seed):
    values, out = np.arange(7 * 32, dtype=np.uint32).reshape(7, 32), np.zeros((7, 32), np.uint32)
    source = PIPELINE.replace("WAIT_EMPTY", "wait(at_empty, phase ^ 1);")
    run_kernel(source, values, out, 7, threads=64, seed=seed)
    assert (out == values[:, ::-1]).all()


def test_a_stage_that_is_filled_too_early_is_found():
    values, out = np.zeros((7, 32), np.uint32), np.zeros((7, 32), np.uint32)
    with pytest.raises((RaceDetected, BarrierMisuse)):
        run_kernel(PIPELINE.replace("WAIT_EMPTY", ""), values, out, 7, threads=64)


COPIES = """
KERNEL()(const u32* in, u32* out) {
    __shared__ u32 words[2][32];
    __shared__ u64 barrier;
    u32 lane = threadIdx.x, at = shared_address(&barrier);
    if (lane == 0) init_barrier(at, 32);
    __syncwarp();
    auto copy = [&](u32 to, u32 from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
            :: "r"(shared_address(&words[to][lane])), "l"(in + from * 32 + lane) : "memory");
    };
#define ASYNC(text) asm volatile("cp.async." text ";" ::: "memory")
#define ARRIVE asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at))
    BODY
    out[lane] = words[0][lane] + words[1][lane];
}
"""


@pytest.mark.parametrize(
    "body",
    [
        'copy(0, 0); copy(1, 1); ASYNC("wait_all");',
        'copy(0, 0); ASYNC("wait_all"); copy(1, 1); ASYNC("wait_all");',
        'copy(0, 0); ASYNC("commit_group"); copy(1, 1); ASYNC("commit_group");'
        ' ASYNC("wait_group 0");',
        'copy(0, 0); ARRIVE; copy(1, 1); ASYNC("wait_all"); wait(at, 0);',
        'copy(0, 1); ASYNC("wait_all"); copy(0, 0); copy(1, 1); ARRIVE; wait(at, 0);',
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_enough_waits(body, seed):
    values, out = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    run_kernel(COPIES.replace("BODY", body), values, out, threads=32, seed=seed)
    assert (out == values[:32] + values[32:]).all()


@pytest.mark.parametrize(
    "body",
    [
        'copy(0, 0); ASYNC("wait_all"); copy(1, 1);',
        # One group is not waited for, whichever copies come first.
        'copy(0, 0); ASYNC("commit_group"); copy(1, 1); ASYNC("commit_group");'
        ' ASYNC("wait_group 1");',
        "copy(0, 0); ARRIVE; copy(1, 1); wait(at, 0);",  # the second one is behind the arrival
        'copy(0, 1); copy(0, 0); copy(1, 1); ASYNC("wait_all");',  # two copies to one place
        'words[0][lane] = 1; copy(1, 1); copy(0, 0); words[0][lane] = 2; ASYNC("wait_all");',
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_too_few_waits_are_found(body, seed):
    values, out = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    with pytest.raises((RaceDetected, Uninitialized)):
        run_kernel(COPIES.replace("BODY", body), values, out, threads=32, seed=seed)


def test_an_exit_with_copies_in_flight_is_found():
    body = 'copy(0, 0); copy(1, 0); ASYNC("wait_all"); copy(0, 1); return;'
    with pytest.raises(InvalidOperation, match="exits while asynchronous copies"):
        run_kernel(COPIES.replace("BODY", body), *np.zeros((2, 64), np.uint32), threads=32)


def test_sizes():
    with pytest.raises(InvalidPtx, match="cg copies 16 bytes"):
        run_body("cp.async.cg.shared.global [%r0], [%rd0], 8;")
    with pytest.raises(InvalidPtx, match="the size must be 4, 8 or 16"):
        run_body("cp.async.ca.shared.global [%r0], [%rd0], 12;")
