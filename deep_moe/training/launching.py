"""One kernel of the layer or of its products: on a GPU, or in the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

from deep_moe.fused.gpu import Gpu
from deep_moe.fused.loaded_kernels import built_kernel, launcher_of
from deep_moe.heuristics.training import TrainingConfig
from deep_moe.jit.launch import MemoryRegion, RankLaunch, run_emulated

Config = TypeVar("Config", bound=TrainingConfig)


def config_of(make: Callable[..., Config], **fields: Any) -> Config:
    """make(**fields), the same object for equal fields: making one takes 10 to 20 us of a host, and
    comparing two that are equal some more in each cache of kernels."""
    config: Config = _made(make, **fields)
    return config


@lru_cache(maxsize=1024)
def _made(make: Callable[..., Any], **fields: Any) -> Any:
    return make(**fields)


def launch(
    gpu: Gpu | None,
    config: TrainingConfig,
    args: ctypes.Structure,
    num_ctas: int,
    read: dict[str, torch.Tensor],
    written: dict[str, torch.Tensor],
) -> None:
    """On the current stream, or now where gpu is None. The emulator refuses to touch any other
    tensor."""
    if num_ctas == 0:
        return
    if gpu is not None:
        launcher_of(config, gpu).launch(args, num_ctas, gpu.current_stream())
        return
    regions = [
        *(MemoryRegion.of_tensor(name, t, is_writable=False) for name, t in read.items()),
        *(MemoryRegion.of_tensor(name, t, is_writable=True) for name, t in written.items()),
    ]
    memory = tuple(_joined(regions))
    kernel = built_kernel(config, for_emulator=True)
    smem_bytes = config.smem_bytes
    launched = RankLaunch(0, kernel, num_ctas, config.num_threads, smem_bytes, args, memory)
    run_emulated([launched], seed=0, checks=True, clock="virtual")


def _joined(regions: list[MemoryRegion]) -> list[MemoryRegion]:
    """Two halves of the same rows overlap; the emulator wants memory once."""
    joined: list[MemoryRegion] = []
    for region in sorted((r for r in regions if r.num_bytes), key=lambda r: r.address):
        if joined and region.address < joined[-1].address + joined[-1].num_bytes:
            last = joined.pop()
            end = max(last.address + last.num_bytes, region.address + region.num_bytes)
            name = f"{last.name}, {region.name}"
            is_writable = last.is_writable or region.is_writable
            region = MemoryRegion(name, last.address, end - last.address, is_writable)
        joined.append(region)
    return joined
