"""Quantizing whole tensors of weights to NVFP4, and back."""

from __future__ import annotations

from typing import Any

import torch

from deep_moe.formats.mx import by_matrix, require_dtype
from deep_moe.formats.nvfp4 import GROUP_SIZE
from deep_moe.tensor_memory import check_dense, check_memory

from ..layers import LayerWeights
from ..quantizing import check_matrices
from .format import FORMAT


def quantize_nvfp4(x: torch.Tensor, num_matrices: int = 1) -> LayerWeights:
    """Quantize weights `x` [..., N, K] to the tensors that `transform_weights_for_mega_moe` takes:
    packed E2M1 int8 [..., N, K/2], two values per byte, E4M3 scales float8_e4m3fn [..., N, K/16],
    and float32 scales of matrices [..., num_matrices].

    Args:
        x: bfloat16, float16 or float32 without NaN and infinity: [E, 2*I, H] with the rows of gate
            before those of up for Linear1, [E, H, I] for Linear2. K, the dimension that products
            sum over, is a multiple of 32.
        num_matrices: number of matrices, one below the other in N; 2 for Linear1. The scale of a
            matrix is its largest magnitude / 2688. The scale of 16 values is their largest
            magnitude / 6 / the matrix's scale, rounded to E4M3. Values, divided by both scales, are
            rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to even.

    Examples:
        >>> layer = quantize_nvfp4(torch.full((2, 32), 0.75))
        >>> value = dequantize_nvfp4(*layer)[0, 0].item()
        >>> [tuple(tensor.shape) for tensor in layer], round(value, 6)
        ([(2, 16), (2, 2), (1,)], 0.75)

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    check_matrices(x, num_matrices)
    return LayerWeights(
        *by_matrix(lambda own: FORMAT.quantize(own, num_matrices=num_matrices), x=x)
    )


def dequantize_nvfp4(
    packed: torch.Tensor,
    sf: torch.Tensor,
    global_sf: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weights [..., N, K] that the tensors of `quantize_nvfp4` stand for, rounded once.

    Args:
        packed: int8 or uint8 [..., N, K/2], two E2M1 values in each byte.
        sf: float8_e4m3fn [..., N, K/16].
        global_sf: float32 [..., matrices], of so many matrices one below the other.
        dtype: of the result.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    if not isinstance(global_sf, torch.Tensor):
        raise TypeError(f"global_sf must be a tensor; got {type(global_sf).__name__}")
    check_dense("global_sf", global_sf)
    check_memory("global_sf", global_sf)
    require_dtype(dtype)
    _check_form(packed, sf, global_sf)

    def of_matrices(*own: torch.Tensor) -> tuple[torch.Tensor]:
        layer = (*own[:2], own[2].squeeze(-1))
        return (FORMAT.dequantize(layer, layer[2].shape[0]).to(dtype),)

    of_rows = global_sf.unsqueeze(-1)
    return by_matrix(of_matrices, packed=packed, sf=sf, global_sf=of_rows)[0]


def _check_form(packed: Any, sf: Any, global_sf: torch.Tensor) -> None:
    """Raise unless these are tensors of one layer's dtypes and sizes."""
    tensors = {"packed": packed, "sf": sf, "global_sf": global_sf}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    dtypes = {
        "packed": (torch.int8, torch.uint8),
        "sf": (torch.float8_e4m3fn,),
        "global_sf": (torch.float32,),
    }
    for name, allowed in dtypes.items():
        if tensors[name].dtype not in allowed:
            words = " or ".join(map(str, allowed))
            raise TypeError(f"{name} must be {words}; got {tensors[name].dtype}")
    if packed.ndim < 2 or 2 * packed.shape[-1] % GROUP_SIZE:
        raise ValueError(
            f"packed must have shape [..., N, K/2], K a multiple of {GROUP_SIZE}; "
            f"got {tuple(packed.shape)}"
        )
    *others, num_rows, num_bytes = packed.shape
    expected = (*others, num_rows, 2 * num_bytes // GROUP_SIZE)
    if tuple(sf.shape) != expected:
        raise ValueError(f"sf must have shape {expected}, as packed has it; got {tuple(sf.shape)}")
    num_matrices = global_sf.shape[-1] if global_sf.ndim else 0
    is_divisor = num_matrices > 0 and num_rows % num_matrices == 0
    if not is_divisor or tuple(global_sf.shape) != (*others, num_matrices):
        raise ValueError(
            f"global_sf must have shape {(*others, 'matrices')}, of matrices that share the "
            f"{num_rows} rows evenly; got {tuple(global_sf.shape)}"
        )
