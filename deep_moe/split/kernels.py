"""The kernels of the split path, built and loaded once, and what one launch of them is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from deep_moe import jit
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.gpu import Gpu
from deep_moe.heuristics.low_latency import LowLatencyConfig
from deep_moe.heuristics.throughput import ThroughputConfig
from deep_moe.jit.cache import CompiledKernel
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.launch import CudaLauncher, MemoryRegion, RankLaunch

SplitConfig: TypeAlias = LowLatencyConfig | ThroughputConfig


@dataclass(frozen=True)
class Launch:
    """One kernel of one rank. read, written: the caller's tensors by name; they live until it has
    been launched."""

    config: SplitConfig
    args: CppStruct
    read: dict[str, torch.Tensor]
    written: dict[str, torch.Tensor]

    def on_gpu(self, gpu: Gpu) -> None:
        """On the current stream."""
        launcher_of(self.config, gpu).launch(self.args, self.config.num_ctas, gpu.current_stream())

    def emulated(self, rank: int, buffers: tuple[MemoryRegion, ...]) -> RankLaunch:
        """For the emulator. buffers: symmetric memory and the status."""
        regions = [
            *buffers,
            *(MemoryRegion.of_tensor(n, t, is_writable=False) for n, t in self.read.items()),
            *(MemoryRegion.of_tensor(n, t, is_writable=True) for n, t in self.written.items()),
        ]
        config = self.config
        return RankLaunch(
            rank,
            built_kernel(config, for_emulator=True),
            config.num_ctas,
            config.num_threads,
            config.smem_bytes,
            self.args,
            tuple(region for region in regions if region.num_bytes),
            smem_layout=config.smem_layout,
        )


@lru_cache(maxsize=256)
def built_kernel(config: SplitConfig, for_emulator: bool = False) -> CompiledKernel:
    """Compiled, and read from the cache, once in a process."""
    if isinstance(config, ThroughputConfig):
        return jit.build_throughput(config, for_emulator=for_emulator)
    return jit.build_low_latency(config, for_emulator=for_emulator)


_launchers: BoundedCache[tuple[SplitConfig, Gpu], CudaLauncher] = BoundedCache(256)


def launcher_of(config: SplitConfig, gpu: Gpu) -> CudaLauncher:
    """The kernel, loaded on this GPU once."""
    launcher = _launchers.get((config, gpu))
    if launcher is not None:
        return launcher
    launcher = gpu.load(
        built_kernel(config),
        num_threads=config.num_threads,
        smem_bytes=config.smem_bytes,
        is_cooperative=True,  # those that receive wait for all CTAs
    )
    return _launchers.put((config, gpu), launcher)
