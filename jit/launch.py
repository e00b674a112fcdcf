"""Runs a compiled kernel: on a GPU, or for any number of ranks in the emulator."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from deep_moe.emulator.machine import Schedule

    from .cache import CompiledKernel


@dataclass(frozen=True)
class MemoryRegion:
    """Global memory that a launch may touch."""

    name: str
    address: int
    num_bytes: int
    is_writable: bool

    @classmethod
    def of_tensor(cls, name: str, tensor: torch.Tensor, *, is_writable: bool) -> MemoryRegion:
        """From the tensor's first element to its last."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return cls(name, tensor.data_ptr(), num_bytes, is_writable)


@dataclass(frozen=True)
class RankLaunch:
    """One rank's part of a call.

    num_threads: per CTA. smem_bytes: dynamic shared memory per CTA. memory: what `args` points to;
    the emulator faults on any access outside.
    """

    rank: int
    kernel: CompiledKernel
    num_ctas: int
    num_threads: int
    smem_bytes: int
    args: ctypes.Structure
    memory: tuple[MemoryRegion, ...]


def run_emulated(
    launches: Sequence[RankLaunch],
    *,
    seed: int,
    checks: bool,
    clock: Literal["virtual", "real"],
    schedule: Schedule = "random",
    progress: Callable[[int], None] | None = None,
    hopper_fp8_sums: bool = False,
) -> None:
    """Run all launches at once, to completion.

    seed, schedule: pick the interleaving, see `Machine`. checks: look for races and the like
    (slower). clock: "real" if
    other processes take part, else "virtual", where waiting costs nothing. progress: told now and
    then how many warp instructions have been executed. hopper_fp8_sums: drop the low bits of FP8
    sums as an H200 does.
    """
    from deep_moe.emulator import Machine

    machine = Machine(
        seed=seed,
        schedule=schedule,
        checks=checks,
        clock=clock,
        strict_tcgen05=True,
        hopper_fp8_sums=hopper_fp8_sums,
    )
    modules: dict[str, Any] = {}
    for launch in launches:
        for region in launch.memory:
            machine.add_memory(
                launch.rank,
                region.address,
                region.num_bytes,
                region.name,
                writable=region.is_writable,
            )
        kernel = launch.kernel
        if kernel.key not in modules:
            modules[kernel.key] = machine.load(kernel.ptx, name=str(kernel.folder / "kernel.ptx"))
        machine.launch(
            modules[kernel.key],
            kernel.name,
            grid=(launch.num_ctas, 1, 1),
            block=(launch.num_threads, 1, 1),
            shared_bytes=launch.smem_bytes,
            args=bytes(launch.args),
            rank=launch.rank,
        )
    machine.run(progress)


class CudaLauncher:
    """A kernel loaded into the CUDA context that is current when this object is made.

    cuda.core loads the module. The launch itself goes through cuda.bindings, because cuda.core
    has no kernel argument that is a struct of 1856 bytes.

    num_threads, smem_bytes: as in RankLaunch. is_cooperative: all CTAs are resident at once,
        whatever other streams do, as grid barriers need it.
    """

    def __init__(
        self,
        kernel: CompiledKernel,
        *,
        num_threads: int,
        smem_bytes: int = 0,
        is_cooperative: bool = False,
    ) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._driver = driver
        # Kept: the module is unloaded with it.
        self._object_code = ObjectCode.from_cubin(kernel.cubin, name=kernel.name)
        handle = self._object_code.get_kernel(kernel.name).handle
        self._function = driver.CUkernel(int(handle))
        status, self._context = driver.cuCtxGetCurrent()
        _check(driver, status, "find the current context")
        status, device = driver.cuCtxGetDevice()
        _check(driver, status, "find the current device")
        (status,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            smem_bytes,
            self._function,
            device,
        )
        _check(driver, status, f"give the kernel {smem_bytes} bytes of shared memory")
        self._success = driver.CUresult.CUDA_SUCCESS
        self._context_address = int(self._context)
        self._of_thread = _OfThread(driver, num_threads, smem_bytes, is_cooperative)

    def launch(self, args: ctypes.Structure, num_ctas: int, stream: int) -> None:
        """Enqueue one call on a stream (a cudaStream_t) of the launcher's context. The arguments
        are copied. Any thread may call this, whatever context it is in."""
        driver = self._driver
        status, context = driver.cuCtxGetCurrent()
        _check(driver, status, "find the current context")
        if int(context) == self._context_address:
            self._enqueue(args, num_ctas, stream)
            return
        # The thread works on another device, or has not used CUDA yet.
        (status,) = driver.cuCtxPushCurrent(self._context)
        _check(driver, status, "switch to the kernel's context")
        try:
            self._enqueue(args, num_ctas, stream)
        finally:
            status, _ = driver.cuCtxPopCurrent()
            _check(driver, status, "switch back from the kernel's context")

    def _enqueue(self, args: ctypes.Structure, num_ctas: int, stream: int) -> None:
        config = self._of_thread.config
        config.gridDimX = num_ctas
        config.hStream = stream
        parameters = _ParameterArray(ctypes.addressof(args))
        (status,) = self._driver.cuLaunchKernelEx(
            config, self._function, ctypes.addressof(parameters), 0
        )
        if status != self._success:
            _check(self._driver, status, "launch the kernel")


_ParameterArray = ctypes.c_void_p * 1


class _OfThread(threading.local):
    """A launch configuration that is prepared once. One per thread: a launch writes its grid and
    stream into it, and lets other threads run while the driver reads it."""

    def __init__(
        self, driver: Any, num_threads: int, smem_bytes: int, is_cooperative: bool
    ) -> None:
        self.config = driver.CUlaunchConfig()
        self.config.gridDimY = self.config.gridDimZ = 1
        self.config.blockDimX = num_threads
        self.config.blockDimY = self.config.blockDimZ = 1
        self.config.sharedMemBytes = smem_bytes
        if is_cooperative:
            cooperative = driver.CUlaunchAttribute()
            cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            cooperative.value.cooperative = 1
            self.config.attrs = [cooperative]
            self.config.numAttrs = 1


def _check(driver: Any, status: Any, what: str) -> None:
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA could not {what}: {status.name}")
