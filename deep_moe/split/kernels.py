"""What one launch of a kernel of the split path is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from deep_moe.fused.gpu import Gpu
from deep_moe.fused.loaded_kernels import built_kernel, launcher_of
from deep_moe.heuristics.low_latency import LowLatencyConfig
from deep_moe.heuristics.throughput import ThroughputConfig
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.launch import MemoryRegion, RankLaunch

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
