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
    """x / y, rounded up.

    Args:
        x: an int.
        y: a positive int.
    """
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The smallest multiple of y that is at least x.

    Args:
        x: an int.
        y: a positive int.
    """
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`deep_moe.quantize_mxfp8` of x [M, K]: float8_e4m3fn [M, K] and scales, float32 [M, K/32] or,
    packed, int32 [M, K/128], with use_ue8m0 and gran_k 32. Without use_ue8m0 and with gran_k 128
    scales are any numbers, float32 [M, K/128].

    Args:
        x: bfloat16, float16 or float32 [M, K].
        use_ue8m0: whether scales are powers of two.
        gran_k: values along K that share a scale: 32 with use_ue8m0, 128 without.
        use_packed_ue8m0: give four UE8M0 bytes in each int32 instead of float32 scales.
    """
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
        x: bfloat16, float16 or float32 [N, K]. Values halfway between two numbers go to the even
            one.
        use_ue8m0: True only.
        gran_k: values along K that share a scale: 32 only.
        use_packed_ue8m0: give four UE8M0 bytes in each int32 instead of float32 scales.
    """
    _check_format(use_ue8m0, gran_k)
    packed, words = quantize_mxfp4(x)
    return packed, _scales(words, use_packed_ue8m0)


def cast_back_from_fp4(
    packed: torch.Tensor, sf: torch.Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> torch.Tensor:
    """The float32 values [N, K] of what `per_token_cast_to_fp4` returned.

    Args:
        packed: int8 [N, K/2], two E2M1 values in each byte.
        sf: float32 [N, K/32], or int32 [N, K/128] where they are packed.
        gran_k: values along K that share a scale: 32 only.
        use_packed_ue8m0: whether `sf` has four UE8M0 bytes in each int32.
    """
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
