"""A GPU as calls use it. What is asked of the driver once is asked here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from deep_moe.heuristics.config import ARCHITECTURES
from deep_moe.jit.cache import CompiledKernel
from deep_moe.jit.launch import CudaLauncher
from deep_moe.jit.tensor_map import TensorMapSpec

from .weights import weight_arch


@dataclass(frozen=True)
class Gpu:
    """name: as the driver gives it. arch: "sm_90a" and so on. num_sms: the CTAs of a call that asks
    for no other number; a multiple of the cluster's size."""

    device: torch.device
    name: str
    arch: str
    num_sms: int

    def load(
        self,
        kernel: CompiledKernel,
        *,
        num_threads: int,
        smem_bytes: int = 0,
        is_cooperative: bool = False,
    ) -> CudaLauncher:
        """The kernel, ready to be launched here; arguments as `CudaLauncher` has them."""
        with torch.cuda.device(self.device):
            return CudaLauncher(
                kernel,
                num_threads=num_threads,
                smem_bytes=smem_bytes,
                is_cooperative=is_cooperative,
            )

    def encode_tensor_map(self, spec: TensorMapSpec) -> bytes:
        """The driver's image of a tensor map in this GPU's memory."""
        with torch.cuda.device(self.device):
            return spec.encode_cuda()

    def current_stream(self) -> int:
        """The cudaStream_t that PyTorch's operators would use here, in this thread."""
        return torch.cuda.current_stream(self.device.index).cuda_stream


@lru_cache(maxsize=64)
def gpu_of(device: torch.device) -> Gpu | None:
    """What calls on tensors of this device run on; None stands for the emulator."""
    if device.type != "cuda":
        return None
    arch = weight_arch(device)
    properties = torch.cuda.get_device_properties(device)
    num_sms = properties.multi_processor_count
    if arch in ARCHITECTURES:
        num_sms -= num_sms % ARCHITECTURES[arch].cluster_size
    return Gpu(device, properties.name, arch, num_sms)
