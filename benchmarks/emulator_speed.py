"""How many warp instructions a second the emulator executes, with its checks and without.

python -m benchmarks.emulator_speed

Of each kernel the best of several runs counts, in processor time, so that other work on the machine
matters little. Results are compared with NumPy's first.
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
class Speed:
    """warp_instructions_per_second: the best of the runs, in processor time."""

    kernel: str
    checks: bool
    warp_instructions_per_second: float


def measure(ptx: str, name: str, *, checks: bool, num_runs: int) -> Speed:
    kernel = KERNELS[name]
    x = np.random.default_rng(0).integers(0, 9, SIDE * SIDE).astype(np.float32)
    best = 0.0
    for _ in range(num_runs):
        y = np.zeros_like(x)
        machine = Machine(checks=checks)
        machine.add_array(x, "x")
        machine.add_array(y, "y")
        module = machine.load(ptx)
        args = [kernel.size, x, y]
        machine.launch(module, name, grid=kernel.grid, block=kernel.block, args=args)
        start = time.process_time()
        machine.run()
        seconds = time.process_time() - start
        expected = kernel.expected(x)
        if not np.array_equal(y[: expected.size], expected):
            raise SystemExit(f"{name}: the result is wrong")
        best = max(best, machine.statistics.warp_instructions / seconds)
    return Speed(name, checks, best)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4, help="runs of each kernel; the best counts")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, not {options.runs}")
    ptx = jit.compile_to_ptx(SOURCE, arch=chips.load("h100").arch)
    speeds = [
        measure(ptx, name, checks=checks, num_runs=options.runs)
        for checks in (True, False)
        for name in KERNELS
    ]
    if options.json:
        print(json.dumps([asdict(speed) for speed in speeds]))
        return
    for speed in speeds:
        print(
            f"{speed.kernel:<10} {'with' if speed.checks else 'without':<7} checks "
            f"{speed.warp_instructions_per_second / 1e6:6.1f} million warp instructions a second"
        )


if __name__ == "__main__":
    main()
