"""Divergence, collectives under divergence, calls, scopes: kernels as NVRTC makes them, and PTX."""

from __future__ import annotations

import numpy as np
import pytest

from .device import run_kernel
from .raw_ptx import run_body

SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_of_different_length_per_lane(seed):
    out = np.zeros(256, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    u32 n = threadIdx.x + 1, steps = 0;
    while (n != 1) { n = n & 1 ? 3 * n + 1 : n / 2; ++steps; }
    out[threadIdx.x] = steps;
}
""",
        out,
        threads=256,
        seed=seed,
    )

    def collatz(n: int) -> int:
        steps = 0
        while n != 1:
            n, steps = (3 * n + 1 if n & 1 else n // 2), steps + 1
        return steps

    assert out.tolist() == [collatz(n) for n in range(1, 257)]


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_of_disjoint_masks_inside_branches(seed):
    out = np.zeros(32, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    u32 lane = threadIdx.x, value = lane * lane;
    if (lane % 3 == 0) {
        u32 mask = 0x49249249;
        for (u32 i = 0; i < lane; ++i) value += i;
        value = __reduce_add_sync(mask, value);
    } else {
        u32 mask = 0xb6db6db6;
        value = __shfl_sync(mask, value, 31);
    }
    out[lane] = value;
}
""",
        out,
        threads=32,
        seed=seed,
    )
    total = sum(n * n + n * (n - 1) // 2 for n in range(0, 32, 3))
    assert out.tolist() == [total if n % 3 == 0 else 961 for n in range(32)]


def test_warp_collectives():
    out = np.zeros((8, 32), np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    u32 lane = threadIdx.x, all = 0xffffffff;
    out[lane] = __ballot_sync(all, lane % 5 == 0);
    out[32 + lane] = __match_any_sync(all, lane / 4);
    out[64 + lane] = __shfl_up_sync(all, lane, 3, 16);
    out[96 + lane] = __shfl_xor_sync(all, lane, 21);
    out[128 + lane] = __reduce_max_sync(all, lane ^ 9);
    out[160 + lane] = __any_sync(all, lane == 7) + 2 * __all_sync(all, lane < 31);
    u32 leader;
    asm volatile("{ .reg .pred p; elect.sync %0|p, %1; @p add.u32 %0, %0, 100; }"
                 : "=r"(leader) : "r"(all));
    out[192 + lane] = leader;
    out[224 + lane] = __activemask();
}
""",
        out,
        threads=32,
    )
    lanes = np.arange(32)
    assert (out[0] == sum(1 << n for n in range(0, 32, 5))).all()
    assert out[1].tolist() == [0xF << 4 * (n // 4) for n in range(32)]
    assert out[2].tolist() == [n - 3 if n % 16 >= 3 else n for n in range(32)]
    assert (out[3] == lanes ^ 21).all()
    assert (out[4] == 31).all()
    assert (out[5] == 1).all()
    assert out[6].tolist() == [100] + [0] * 31
    assert (out[7] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_may_spin_on_another_lane_of_its_warp(seed):
    out = np.zeros(32, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    __shared__ volatile u32 turn;
    if (threadIdx.x == 0) turn = 0;
    __syncwarp();
    while (turn != threadIdx.x) {}
    out[threadIdx.x] = turn;
    turn = threadIdx.x + 1;
}
""",
        out,
        threads=32,
        seed=seed,
    )
    assert out.tolist() == list(range(32))


def test_syncwarp_pairs_up_across_branches():
    out = np.zeros(32, np.uint32)
    run_body(
        """
mov.u32 %r0, %laneid;
setp.lt.u32 %c0, %r0, 16;
mul.wide.u32 %rd0, %r0, 4;
add.u64 %rd0, %rd0, %p0;
@%c0 bra LOW;
st.global.u32 [%rd0], %r0;
bar.warp.sync 0xffffffff;
bra DONE;
LOW:
bar.warp.sync 0xffffffff;
ld.global.u32 %r1, [%rd0+64];
st.global.u32 [%rd0], %r1;
DONE:
""",
        out,
    )
    assert out.tolist() == [n % 16 + 16 for n in range(32)]


def test_functions_that_are_not_inlined():
    out = np.zeros(64, np.uint32)
    run_kernel(
        """
struct Pair { u32 a, b; u64 c; };
__device__ __noinline__ u32 square(u32 x) { return x * x + 1; }
__device__ __noinline__ Pair make(u32 x, u64 y) {
    Pair p;
    p.a = square(x);
    p.b = x;
    p.c = y;
    return p;
}
KERNEL()(u32* out) {
    u32 x = threadIdx.x;
    if (x % 2) x = square(x);
    Pair p = make(x, 5ull << 32);
    out[threadIdx.x] = p.a + p.b + u32(p.c >> 32);
}
""",
        out,
        threads=64,
    )
    values = [n * n + 1 if n % 2 else n for n in range(64)]
    assert out.tolist() == [v * v + 1 + v + 5 for v in values]


def test_branch_tables_and_local_arrays():
    out = np.zeros(64, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out, u32 n) {
    u32 table[8];
    for (u32 i = 0; i < 8; ++i) table[i] = i * n;
    u32 value = table[threadIdx.x % 8];
    switch (threadIdx.x % 11) {
        case 0: value += 5; break;
        case 1: value *= 7; break;
        case 2: value ^= 0x55; break;
        case 3: value -= 9; break;
        case 4: value = ~value; break;
        case 5: value <<= 3; break;
        case 6: value = 1; break;
        default: value = 0;
    }
    out[threadIdx.x] = value;
}
""",
        out,
        3,
        threads=64,
    )

    def model(n: int) -> int:
        v = n % 8 * 3
        return ([v + 5, v * 7, v ^ 0x55, v - 9, ~v, v << 3, 1] + [0] * 4)[n % 11] % 2**32

    assert out.tolist() == [model(n) for n in range(64)]


def test_inner_scopes_shadow_names():
    out = np.zeros(1, np.uint32)
    run_body(
        """
.reg .b32 x;
mov.u32 x, 1;
{ .reg .b32 x; mov.u32 x, 10; { .reg .b64 x; mov.u64 x, 5; } add.u32 x, x, 1; bra NEXT; NEXT: }
{.reg.b32 x; mov.u32 x, 20; bra NEXT; NEXT: }
st.global.u32 [%p0], x;
""",
        out,
        threads=1,
    )
    assert out[0] == 1


def test_early_exits_do_not_hold_up_barriers():
    out = np.zeros(128, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    __shared__ u32 sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    if (threadIdx.x >= 96) return;
    atomicAdd(&sum, threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = sum;
}
""",
        out,
        threads=128,
    )
    assert out.tolist() == [sum(range(96))] * 96 + [0] * 32
