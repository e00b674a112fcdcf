"""The choice of `Steps` for a call."""

from __future__ import annotations

import torch

from deep_moe.fused.gpu import gpu_of

from .kernel_steps import KernelSteps
from .plain_steps import PlainSteps
from .steps import Steps


def steps_for(x: torch.Tensor, arch: str | None) -> Steps:
    """Who does the steps for a layer whose tokens are these. arch: a target's name, or None."""
    if x.dtype != torch.bfloat16:
        return PlainSteps()
    gpu = gpu_of(x.device)
    if gpu is not None:
        own = gpu.target.name
        if arch not in (None, own):
            raise ValueError(f"arch must be {own}, that of {x.device}, or None; got {arch!r}")
        return KernelSteps(own, gpu)
    return PlainSteps() if arch is None else KernelSteps(arch, None)
