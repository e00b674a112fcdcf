"""The kernels of this process: each is compiled or read once, and loaded once on a GPU."""

from __future__ import annotations

from functools import lru_cache

from deep_moe import jit
from deep_moe.jit.cache import CompiledKernel
from deep_moe.jit.launch import CudaLauncher

from .bounded_cache import BoundedCache
from .gpu import Gpu


@lru_cache(maxsize=1024)
def built_kernel(config: jit.KernelConfig, for_emulator: bool = False) -> CompiledKernel:
    return jit.build(config, for_emulator=for_emulator)


# One per kernel and device: a module belongs to the device's context.
_launchers: BoundedCache[tuple[jit.KernelConfig, Gpu], CudaLauncher] = BoundedCache(2048)


def is_loaded(config: jit.KernelConfig, gpu: Gpu) -> bool:
    return _launchers.get((config, gpu)) is not None


def launcher_of(config: jit.KernelConfig, gpu: Gpu) -> CudaLauncher:
    """The kernel, loaded on this GPU."""
    launcher = _launchers.get((config, gpu))
    if launcher is not None:
        return launcher
    launcher = gpu.load(
        built_kernel(config),
        num_threads=config.num_threads,
        smem_bytes=config.smem_bytes,
        is_cooperative=config.is_cooperative,
    )
    return _launchers.put((config, gpu), launcher)
