"""Quantizing as callers of DeepGEMM do it before a Mega MoE call."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import GROUP_SIZE, ue8m0_to_float, unpack_ue8m0
from deep_moe.formats.float_scaled import GROUP_SIZE as FLOAT_GROUP_SIZE
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.formats.mx import quantize_mxfp8
from deep_moe.weights.mxfp4.quantizing import dequantize_mxfp4, quantize_mxfp4

from .operands import packed_scales

__all__ = [
    "align",
    "cast_back_from_fp4",
    "ceil_div",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
]


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The smallest multiple of y that is at least x."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`deep_moe.quantize_mxfp8` of x [M, K]: float8_e4m3fn [M, K] and scales, float32 [M, K/32] or,
    packed, int32 [M, K/128], with use_ue8m0 and gran_k 32. Without use_ue8m0 and with gran_k 128
    scales are any numbers, float32 [M, K/128]."""
    if not use_ue8m0 and gran_k == FLOAT_GROUP_SIZE and not use_packed_ue8m0:
        return quantize_e4m3_float(x)
    _check_format(use_ue8m0, gran_k)
    values, words = quantize_mxfp8(x)
    return values, _scales(words, use_packed_ue8m0)


def per_token_cast_to_fp4(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`deep_moe.quantize_mxfp4` of x [N, K]: packed int8 [N, K/2] and scales, float32 [N, K/32] or,
    packed, int32 [N, K/128].

    Args:
        use_ue8m0: True only.
        gran_k: 32 only. Values halfway between two numbers go to the even one.
    """
    _check_format(use_ue8m0, gran_k)
    packed, words = quantize_mxfp4(x)
    return packed, _scales(words, use_packed_ue8m0)


def cast_back_from_fp4(
    packed: torch.Tensor, sf: torch.Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> torch.Tensor:
    """The float32 values [N, K] of what `per_token_cast_to_fp4` returned."""
    _check_format(True, gran_k)
    if (sf.dtype == torch.int32) != use_packed_ue8m0:
        raise TypeError(f"sf must be int32 if use_packed_ue8m0, else float32; got {sf.dtype}")
    rows, num_bytes = packed.shape
    return dequantize_mxfp4(packed, packed_scales("sf", sf, (rows,), 2 * num_bytes))


def _check_format(use_ue8m0: bool, gran_k: int) -> None:
    if not use_ue8m0:
        raise ValueError("use_ue8m0 must be True, scales are powers of two; got False")
    if gran_k != GROUP_SIZE:
        raise ValueError(f"gran_k must be {GROUP_SIZE}, values that share a scale; got {gran_k}")


def _scales(words: torch.Tensor, is_packed: bool) -> torch.Tensor:
    return words if is_packed else ue8m0_to_float(unpack_ue8m0(words), torch.float32)
