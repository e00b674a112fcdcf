"""Checks of arguments. Each error names the argument, what is allowed, and what was got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def require_type(name: str, value: Any, types: Any, allowed: str) -> None:
    """`types` as in isinstance, but a bool is no int."""
    if not isinstance(value, types) or (types is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be {allowed}; got {type(value).__name__}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int],
    device: torch.device,
) -> None:
    """Of (one of) these dtypes, of this shape, on this device."""
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(map(str, allowed))}; got {tensor.dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} must have shape {tuple(shape)} for this buffer; got {tuple(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, as the buffer is; got {tensor.device}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")


def check_start(name: str, tensor: torch.Tensor, alignment: int) -> None:
    """Starts at a multiple of `alignment` bytes."""
    if tensor.data_ptr() % alignment:
        raise ValueError(
            f"{name} must start at a multiple of {alignment} bytes; got {tensor.data_ptr():#x}"
        )


def form(tensor: torch.Tensor) -> tuple[object, ...]:
    """What the checks of a tensor look at, beside where it starts. Hashable."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
