"""Quantizing whole tensors to MXFP8, and back.

The format and its rounding are those of block_scaled.py. Here a stack of matrices is taken one
by one, so that the intermediate float32 and float64 tensors are those of one expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deep_moe.tensor_memory import check_dense, check_memory

from .block_scaled import (
    dequantize_e4m3_ue8m0,
    quantize_e4m3_ue8m0,
)


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations `x` [..., K] to what a buffer's `x` and `x_sf` hold: float8_e4m3fn
    [..., K] and UE8M0 scales int32 [..., K/128] rounded up, four per word.

    Args:
        x: bfloat16, float16 or float32, K a multiple of 32. The scale of 32 values is the smallest
            power of two at which the largest of them is at most 448. A group with NaN or infinity
            becomes NaN.

    `prepare_inputs` does the same in one launch.

    Examples:
        >>> values, sf = quantize_mxfp8(torch.full((128,), 3.0))
        >>> dequantize_mxfp8(values, sf)[0].item()
        3.0

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    values, sf = by_matrix(quantize_e4m3_ue8m0, x=x)
    return values, sf


def dequantize_mxfp8(
    values: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The activations [..., K] that float8_e4m3fn [..., K] and scales int32 [..., K/128] stand
    for.

    Args:
        values: float8_e4m3fn [..., K].
        sf: int32 [..., K/128], four UE8M0 bytes in each.
        dtype: of the result.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    require_dtype(dtype)
    return by_matrix(lambda a, b: (dequantize_e4m3_ue8m0(a, b, dtype),), values=values, sf=sf)[0]


def require_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype; got {dtype!r}")


def by_matrix(
    function: Callable[..., tuple[torch.Tensor, ...]], **arguments: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`function` of each matrix [N, K] of arguments [..., N, K], into one tensor per result."""
    for name, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        check_dense(name, tensor)
        check_memory(name, tensor)
    tensors = tuple(arguments.values())
    leading = tensors[0].shape[:-2]
    for name, tensor in arguments.items():
        if tensor.shape[:-2] != leading:
            raise ValueError(
                f"{name} must have shape {tuple(leading)} before its last two dimensions, as the "
                f"values have; got shape {tuple(tensor.shape)}"
            )
    if not leading or 0 in leading:
        return function(*tensors)
    results: list[torch.Tensor] = []
    for i, matrices in enumerate(zip(*(t.flatten(0, -3) for t in tensors), strict=True)):
        parts = function(*matrices)
        if not results:
            count = leading.numel()
            results = [part.new_empty((count, *part.shape)) for part in parts]
        for result, part in zip(results, parts, strict=True):
            result[i] = part
    return tuple(result.unflatten(0, leading) for result in results)
