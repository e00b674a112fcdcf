"""Runs a compiled kernel: on a GPU, or for any number of ranks in the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .kernel_args import KernelArgs
from .render import KERNEL_NAME

if TYPE_CHECKING:
    from deep_moe.heuristics.config import MegaMoEConfig

    from .cache import CompiledKernel


@dataclass(frozen=True)
class MemoryRegion:
    """Global memory that a launch may touch."""

    name: str
    address: int
    num_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class RankLaunch:
    """One rank's part of a call. `memory` is what its arguments point to: the emulator faults on
    any access outside."""

    rank: int
    kernel: CompiledKernel
    config: MegaMoEConfig
    args: KernelArgs
    memory: tuple[MemoryRegion, ...]


def run_emulated(
    launches: Sequence[RankLaunch], *, seed: int, checks: bool, clock: Literal["virtual", "real"]
) -> None:
    """Run all launches at once, to completion.

    seed: picks the interleaving. checks: look for races and the like (slower). clock: "real" if
    other processes take part, else "virtual", where waiting costs nothing.
    """
    from deep_moe.emulator import Machine

    machine = Machine(seed=seed, checks=checks, clock=clock)
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
        kernel, config = launch.kernel, launch.config
        if kernel.key not in modules:
            modules[kernel.key] = machine.load(kernel.ptx, name=str(kernel.folder / "kernel.ptx"))
        machine.launch(
            modules[kernel.key],
            KERNEL_NAME,
            grid=(config.num_sms, 1, 1),
            block=(config.num_threads, 1, 1),
            shared_bytes=config.smem_bytes,
            args=bytes(launch.args),
            rank=launch.rank,
        )
    machine.run()


class CudaLauncher:
    """A kernel loaded into the current CUDA context.

    cuda.core loads the module. The launch itself goes through cuda.bindings, because cuda.core
    has no kernel argument that is a struct of 1792 bytes. The grid is launched cooperatively: the
    kernel's grid barriers need all CTAs resident at once, whatever other streams do.
    """

    def __init__(self, kernel: CompiledKernel, config: MegaMoEConfig) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._driver = driver
        # Kept: the module is unloaded with it.
        self._object_code = ObjectCode.from_cubin(kernel.cubin, name=KERNEL_NAME)
        handle = self._object_code.get_kernel(KERNEL_NAME).handle
        self._function = driver.CUkernel(int(handle))
        (status, device) = driver.cuCtxGetDevice()
        _check(driver, status, "find the current device")
        (status,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            config.smem_bytes,
            self._function,
            device,
        )
        _check(driver, status, f"give the kernel {config.smem_bytes} bytes of shared memory")
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX = config.num_sms
        self._config.gridDimY = self._config.gridDimZ = 1
        self._config.blockDimX = config.num_threads
        self._config.blockDimY = self._config.blockDimZ = 1
        self._config.sharedMemBytes = config.smem_bytes
        self._config.attrs = [cooperative]
        self._config.numAttrs = 1

    def launch(self, args: KernelArgs, stream: int) -> None:
        """Enqueue one call on a stream (a cudaStream_t). The arguments are copied."""
        self._config.hStream = stream
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        (status,) = self._driver.cuLaunchKernelEx(
            self._config, self._function, ctypes.addressof(parameters), 0
        )
        _check(self._driver, status, "launch the kernel")


def _check(driver: Any, status: Any, what: str) -> None:
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA could not {what}: {status.name}")
