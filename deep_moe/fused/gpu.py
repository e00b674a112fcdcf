"""A GPU as calls use it. Properties that the driver gives are read once, here."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from deep_moe.emulator.tensor_map import TensorMapSpec
from deep_moe.jit.cache import CompiledKernel
from deep_moe.jit.launch import CudaLauncher, current_context, primary_context
from deep_moe.targets import Target, target_of_device

logger = logging.getLogger(__name__)

# Not public, so not counted on; Inductor's code calls it. The public way makes an object first,
# which takes 2 us.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@dataclass(frozen=True)
class Gpu:
    """name: as the driver gives it. num_sms: the CTAs of a call that asks for no other number, in
    whole clusters; no call may have more."""

    device: torch.device
    name: str
    target: Target
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
        with self._context():
            return CudaLauncher(
                kernel,
                num_threads=num_threads,
                smem_bytes=smem_bytes,
                is_cooperative=is_cooperative,
            )

    def encode_tensor_map(self, spec: TensorMapSpec) -> bytes:
        """The driver's image of a tensor map in this GPU's memory."""
        with self._context():
            return spec.encode_cuda()

    def current_stream(self) -> int:
        """The cudaStream_t that PyTorch's operators would use here, in this thread."""
        if _raw_stream is not None:
            return int(_raw_stream(self.device.index))
        return torch.cuda.current_stream(self.device.index).cuda_stream

    def is_capturing(self) -> bool:
        """Whether what is launched on the current stream becomes part of a CUDA graph."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def _context(self) -> AbstractContextManager[None]:
        """Of the driver, not of PyTorch, whose own does nothing in a thread that has not used CUDA
        yet if the device is already the one that the thread would use."""
        return current_context(primary_context(self.device.index))


@lru_cache(maxsize=64)
def gpu_of(device: torch.device) -> Gpu | None:
    """What calls on tensors of this device run on; None stands for the emulator. ValueError for a
    GPU without a kernel."""
    if device.type != "cuda":
        return None
    target = target_of_device(device)
    if not target.was_run:
        _say_that_nobody_has_run(target)
    properties = torch.cuda.get_device_properties(device)
    num_sms = target.whole_clusters(properties.multi_processor_count)
    return Gpu(device, properties.name, target, num_sms)


@cache
def _say_that_nobody_has_run(target: Target) -> None:
    """Once in a process."""
    logger.warning(
        "the kernels for %s (%s) have run in the emulator only; nobody has run them on such a GPU "
        "yet",
        target.name,
        target.gpus,
    )
