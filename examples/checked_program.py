"""An ordinary CUDA program that runs and is checked on a machine without a GPU.

It sums an array by shared memory. Nothing in it knows of the emulator: on a machine with a GPU it
runs there. `warpcheck python examples/checked_program.py` runs it without one, and `--race` leaves
a barrier out, which the checks find.
"""

from __future__ import annotations

import argparse

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

THREADS = 128
SOURCE = """
extern "C" __global__ void sum(const float* values, float* total, int size) {
    __shared__ float part[128];
    float mine = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x)
        mine += values[i];
    part[threadIdx.x] = mine;
    for (int half = 64; half > 0; half /= 2) {
        BARRIER
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) atomicAdd(total, part[0]);
}
"""


def total_of(values: np.ndarray, source: str) -> float:
    device = Device()
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(arch=f"sm_{device.arch}", lineinfo=True)
    kernel = Program(source, "c++", options).compile("cubin").get_kernel("sum")
    inputs = device.allocate(values.nbytes, stream=stream)
    total = device.allocate(4, stream=stream)
    result = np.zeros(1, np.float32)
    driver.cuMemcpyHtoDAsync(int(inputs.handle), values.ctypes.data, values.nbytes, stream.handle)
    driver.cuMemsetD8Async(int(total.handle), 0, 4, stream.handle)
    config = LaunchConfig(grid=4, block=THREADS)
    launch(stream, config, kernel, int(inputs.handle), int(total.handle), np.int32(values.size))
    driver.cuMemcpyDtoHAsync(result.ctypes.data, int(total.handle), 4, stream.handle)
    stream.sync()
    return float(result[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--race", action="store_true", help="leave the barrier out")
    barrier = "" if parser.parse_args().race else "__syncthreads();"
    values = np.arange(1000, dtype=np.float32)
    print("the sum is", total_of(values, SOURCE.replace("BARRIER", barrier)))


if __name__ == "__main__":
    main()
