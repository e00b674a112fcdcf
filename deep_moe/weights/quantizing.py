"""Checks of what is quantized, which formats share."""

from __future__ import annotations

import torch

from deep_moe.formats.sizes import SIZE_UNIT
from deep_moe.tensor_memory import check_dense, check_memory

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_matrices(x: object, num_matrices: int = 1, unit: int = SIZE_UNIT) -> None:
    """Raise unless `x` is finite [..., N, K] with so many matrices in N, K a multiple of `unit`."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor; got {type(x).__name__}")
    check_dense("x", x)
    check_memory("x", x)
    if x.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16; got {x.dtype}")
    if x.dim() < 2 or not x.shape[-1] or x.shape[-1] % unit:
        raise ValueError(
            f"x must have shape [..., N, K] with K a positive multiple of {unit}; got "
            f"{tuple(x.shape)}"
        )
    if isinstance(num_matrices, bool) or not isinstance(num_matrices, int):
        raise TypeError(f"num_matrices must be an int; got {num_matrices!r}")
    num_rows = x.shape[-2]
    if num_matrices < 1 or not num_rows or num_rows % num_matrices:
        raise ValueError(
            f"num_matrices must divide the number of rows, {num_rows}; got {num_matrices}"
        )
    if not bool(x.isfinite().all()):
        raise ValueError(
            "x must be finite, the format holds no NaN and no infinity; got such a value"
        )
