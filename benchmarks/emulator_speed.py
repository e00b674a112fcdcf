"""How fast the emulator is, with its checks and without: kernels that do little but load and store,
and kernels that do little but multiply matrices.

python -m benchmarks.emulator_speed

Speeds are warp instructions and, of tensor cores, multiply-adds in a second of processor time, so
that other work on the machine matters little. Of each kernel the best of several runs counts.
Results are compared with NumPy's first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from deep_moe import jit
from deep_moe.emulator import Machine, chips

SOURCE = """
extern "C" __global__ void saxpy(int n, const float* x, float* y) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = 2 * x[i] + y[i];
}
extern "C" __global__ void transpose(int n, const float* x, float* y) {
    __shared__ float tile[32][33];
    const int column = blockIdx.x * 32, row = blockIdx.y * 32;
    for (int j = threadIdx.y; j < 32; j += 8)
        tile[j][threadIdx.x] = x[(row + j) * n + column + threadIdx.x];
    __syncthreads();
    for (int j = threadIdx.y; j < 32; j += 8)
        y[(column + j) * n + row + threadIdx.x] = tile[threadIdx.x][j];
}
extern "C" __global__ void sum(int n, const float4* x, float* y) {
    float mine = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += gridDim.x * blockDim.x)
        mine += x[i].x + x[i].y + x[i].z + x[i].w;
    for (int offset = 16; offset; offset /= 2) mine += __shfl_xor_sync(~0u, mine, offset);
    if (threadIdx.x % 32 == 0) atomicAdd(y, mine);
}
"""
SIDE = 1024

# Products of two tiles in shared memory, 128-byte swizzled, `turns` times: C = turns * A * B^T.
# A has 64 or 128 rows of 64 halves, B has 128.
TENSOR_PRELUDE = """
typedef unsigned int u32;
typedef unsigned long long u64;
extern __shared__ __align__(1024) unsigned char tiles[];
__device__ u32 fill_tiles(const uint4* x, int rows) {
    for (int i = threadIdx.x; i < rows * 8; i += blockDim.x)
        ((uint4*)tiles)[i ^ (i >> 3 & 7)] = x[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    return u32(__cvta_generic_to_shared(tiles));
}
"""
WGMMA_SOURCE = """
extern "C" __global__ void __launch_bounds__(128) wgmma(int turns, const uint4* x, float* y) {
    const u32 base = fill_tiles(x, 64 + 128);
    const u64 a = 0x4000004000000000ull | base >> 4, b = a + (64 * 128 >> 4);
    float c[64] = {};
    for (int turn = 0; turn < turns; ++turn) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k)
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {REGISTERS},"
                         " %64, %65, 1, 1, 1, 0, 0;"
                         : CONSTRAINTS : "l"(a + 2 * k), "l"(b + 2 * k));
        asm volatile("wgmma.commit_group.sync.aligned;"
                     " wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    for (int i = 0; i < 64; ++i) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        y[row * 128 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = c[i];
    }
}
""".replace("REGISTERS", ", ".join(f"%{i}" for i in range(64))).replace(
    "CONSTRAINTS", ", ".join(f'"+f"(c[{i}])' for i in range(64))
)
TCGEN05_SOURCE = """
extern "C" __global__ void __launch_bounds__(128) tcgen05(int turns, const uint4* x, float* y) {
    __shared__ u64 done;
    __shared__ u32 columns;
    const u32 barrier = u32(__cvta_generic_to_shared(&done));
    if (threadIdx.x < 32)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 128;"
                     :: "r"(u32(__cvta_generic_to_shared(&columns))) : "memory");
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
    const u32 base = fill_tiles(x, 128 + 128), accumulator = columns;
    if (threadIdx.x == 0) {
        const u64 a = 0x4000404000000000ull | base >> 4, b = a + (128 * 128 >> 4);
        const u32 shape = 1 << 4 | 128 >> 3 << 17 | 128 >> 4 << 24;
        for (int turn = 0; turn < turns; ++turn)
            for (int k = 0; k < 4; ++k)
                asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0;"
                             " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }"
                             :: "r"(accumulator), "l"(a + 2 * k), "l"(b + 2 * k), "r"(shape),
                                "r"(turn + k) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%0];"
                     :: "l"(&done) : "memory");
    }
    __syncwarp();
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
                 " @!p bra again; }" :: "r"(barrier) : "memory");
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (u32 column = 0; column < 128; ++column) {
        float value;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=f"(value)
                     : "r"(accumulator + (threadIdx.x / 32 * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        y[threadIdx.x * 128 + column] = value;
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 128;" :: "r"(accumulator));
}
"""


@dataclass(frozen=True)
class Kernel:
    """grid, block: its launch; size: its first argument; expected: y from x."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    size: int
    expected: Callable[[np.ndarray], np.ndarray]


KERNELS = {
    "saxpy": Kernel((64, 1, 1), (256, 1, 1), SIDE * SIDE, lambda x: 2 * x),
    "transpose": Kernel((32, 32, 1), (32, 8, 1), SIDE, lambda x: x.reshape(SIDE, SIDE).T.ravel()),
    "sum": Kernel((64, 1, 1), (256, 1, 1), SIDE * SIDE, lambda x: x.sum(keepdims=True)),
}


@dataclass(frozen=True)
class TensorKernel:
    """rows of A, multiplied with 128 of B, both with 64 halves."""

    arch: str
    source: str
    rows: int


TENSOR_KERNELS = {
    "wgmma": TensorKernel("sm_90a", WGMMA_SOURCE, 64),
    "tcgen05": TensorKernel("sm_100a", TCGEN05_SOURCE, 128),
}
TENSOR_TURNS = 64


@dataclass(frozen=True)
class Speed:
    """per_second: the best of the runs, of what `unit` says."""

    kernel: str
    checks: bool
    per_second: float
    unit: str


def measure(ptx: str, name: str, *, checks: bool, num_runs: int) -> Speed:
    kernel = KERNELS[name]
    x = np.random.default_rng(0).integers(0, 9, SIDE * SIDE).astype(np.float32)
    best = 0.0
    for _ in range(num_runs):
        y = np.zeros_like(x)
        machine = machine_for(x, y, checks=checks)
        args = [kernel.size, x, y]
        machine.launch(machine.load(ptx), name, grid=kernel.grid, block=kernel.block, args=args)
        start = time.process_time()
        machine.run()
        seconds = time.process_time() - start
        expected = kernel.expected(x)
        if not np.array_equal(y[: expected.size], expected):
            raise SystemExit(f"{name}: the result is wrong")
        best = max(best, machine.statistics.warp_instructions / seconds)
    return Speed(name, checks, best, "warp instructions")


def measure_products(name: str, *, checks: bool, num_runs: int) -> Speed:
    kernel = TENSOR_KERNELS[name]
    ptx = jit.compile_to_ptx(TENSOR_PRELUDE + kernel.source, arch=kernel.arch)
    x = np.random.default_rng(0).integers(-2, 3, (kernel.rows + 128, 64)).astype(np.float16)
    a, b = x[: kernel.rows].astype(np.float32), x[kernel.rows :].astype(np.float32)
    best = 0.0
    for _ in range(num_runs):
        y = np.zeros((kernel.rows, 128), np.float32)
        machine = machine_for(x, y, checks=checks)
        machine.launch(
            machine.load(ptx),
            name,
            grid=(1, 1, 1),
            block=(128, 1, 1),
            shared_bytes=x.nbytes,
            args=[TENSOR_TURNS, x, y],
        )
        start = time.process_time()
        machine.run()
        seconds = time.process_time() - start
        if not np.array_equal(y, TENSOR_TURNS * (a @ b.T)):
            raise SystemExit(f"{name}: the result is wrong")
        best = max(best, TENSOR_TURNS * kernel.rows * 128 * 64 / seconds)
    return Speed(name, checks, best, "multiply-adds")


def machine_for(x: np.ndarray, y: np.ndarray, *, checks: bool) -> Machine:
    machine = Machine(checks=checks)
    machine.add_array(x, "x")
    machine.add_array(y, "y")
    return machine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4, help="runs of each kernel; the best counts")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, not {options.runs}")
    ptx = jit.compile_to_ptx(SOURCE, arch=chips.load("h100").arch)
    speeds = []
    for checks in (True, False):
        speeds += [measure(ptx, name, checks=checks, num_runs=options.runs) for name in KERNELS]
        speeds += [
            measure_products(name, checks=checks, num_runs=options.runs) for name in TENSOR_KERNELS
        ]
    if options.json:
        print(json.dumps([asdict(speed) for speed in speeds]))
        return
    for speed in speeds:
        print(
            f"{speed.kernel:<10} {'with' if speed.checks else 'without':<7} checks "
            f"{speed.per_second / 1e6:7.1f} million {speed.unit} a second"
        )


if __name__ == "__main__":
    main()
