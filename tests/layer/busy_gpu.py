"""Other work on the GPU: a kernel that holds some SMs for a while."""

from __future__ import annotations

import ctypes
import time

import torch

from deep_moe import jit
from deep_moe.jit.launch import CudaLauncher

# More than a CTA of the layer leaves of an SM, so that the two cannot share one.
_SOURCE = """
#include <deep_moe/ptx/timer.cuh>

struct HoldArgs {
    volatile unsigned int* started;  // a word per CTA, which the host reads
    unsigned long long ns;
};

extern "C" __global__ void hold_sms(const __grid_constant__ HoldArgs args) {
    __shared__ volatile char room[48 * 1024 - 64];
    room[0] = 0;
    const unsigned long long start = deep_moe::ptx::globaltimer();
    args.started[blockIdx.x] = 1;
    __threadfence_system();
    while (deep_moe::ptx::globaltimer() - start < args.ns) {}
}
"""


class _HoldArgs(ctypes.Structure):
    _fields_ = (("started", ctypes.c_uint64), ("ns", ctypes.c_uint64))


class SmHolder:
    """Holds SMs of the current GPU from a stream of its own."""

    def __init__(self, max_sms: int) -> None:
        major, minor = torch.cuda.get_device_capability()
        kernel = jit.compile_cached(_SOURCE, arch=f"sm_{major}{minor}a", kernel="hold_sms")
        self.stream = torch.cuda.Stream()
        self._started = torch.zeros(max_sms, dtype=torch.int32, pin_memory=True)
        self._launcher = CudaLauncher(kernel, num_threads=32)
        self.hold(1, 0.0)  # loaded, so that the next one starts at once
        self.stream.synchronize()

    def hold(self, num_sms: int, seconds: float) -> None:
        """Returns when the kernel has begun on all of them."""
        self._started.zero_()
        args = _HoldArgs(self._started.data_ptr(), round(1e9 * seconds))
        self._launcher.launch(args, num_sms, self.stream.cuda_stream)
        deadline = time.monotonic() + 10
        while int(self._started.sum()) < num_sms:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{int(self._started.sum())} of {num_sms} CTAs started")
