"""Quantizing whole tensors of weights to INT4, and back."""

from __future__ import annotations

from typing import Any

import torch

from deep_moe.formats.mx import by_matrix, require_dtype

from ..layers import LayerWeights
from ..quantizing import check_matrices
from .format import FORMAT, GROUP_SIZES


def quantize_int4(x: torch.Tensor, group_size: int = 32) -> LayerWeights:
    """Quantize weights `x` [..., N, K] to the pair that `transform_weights_for_mega_moe` takes:
    packed INT4 int8 [..., N, K/2], two codes per byte, each a value from -8 to 7 plus 8, and BF16
    scales [..., N, K/group_size], rounded up.

    Args:
        x: bfloat16, float16 or float32 without NaN and infinity: [E, 2*I, H] with the rows of gate
            before those of up for Linear1, [E, H, I] for Linear2. K, the dimension that products
            sum over, is a multiple of 32.
        group_size: number of values that share a scale, 32 or 128. The scale is their largest
            magnitude / 7, rounded to BF16. Values, divided by it, are rounded to whole numbers,
            ties to even.

    Examples:
        >>> packed, sf = quantize_int4(torch.full((2, 64), 3.5))
        >>> packed.shape, sf[0].tolist(), dequantize_int4(packed, sf)[0, 0].item()
        (torch.Size([2, 32]), [0.5, 0.5], 3.5)

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    check_matrices(x)
    if not isinstance(group_size, int) or group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be 32 or 128; got {group_size!r}")
    return LayerWeights(*by_matrix(lambda own: FORMAT.quantize(own, (1, group_size)), x=x))


def dequantize_int4(
    packed: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weights [..., N, K] that the tensors of `quantize_int4` stand for, rounded once.

    Args:
        packed: int8 or uint8 [..., N, K/2], two codes in each byte.
        sf: bfloat16 [..., N, K/32] or [..., N, K/128], rounded up.
        dtype: of the result.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    require_dtype(dtype)
    _check_form(packed, sf)
    return by_matrix(lambda *own: (FORMAT.dequantize(own).to(dtype),), packed=packed, sf=sf)[0]


def _check_form(packed: Any, sf: Any) -> None:
    """Raise unless these are tensors of one layer's dtypes and sizes."""
    dtypes = {"packed": (torch.int8, torch.uint8), "sf": (torch.bfloat16,)}
    for (name, allowed), tensor in zip(dtypes.items(), (packed, sf), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.dtype not in allowed:
            words = " or ".join(map(str, allowed))
            raise TypeError(f"{name} must be {words}; got {tensor.dtype}")
    if packed.ndim < 2 or not packed.shape[-1]:
        raise ValueError(f"packed must have shape [..., N, K/2]; got {tuple(packed.shape)}")
    *rows, num_bytes = packed.shape
    allowed_shapes = [(*rows, -(-2 * num_bytes // size)) for size in GROUP_SIZES]
    if tuple(sf.shape) not in allowed_shapes:
        words = " or ".join(map(str, allowed_shapes))
        raise ValueError(f"sf must have shape {words}, as packed has it; got {tuple(sf.shape)}")
