"""E4M3 values with a float32 scale per 128 of them, any number or a power of two, or one per token.

A group is 128 consecutive values along the last dimension, or all of them, and amax its largest
magnitude, but at least 1e-4. Its scale is amax * (1 / 448), rounded once per operation, and the
stored value is x * (448 / amax) rounded to E4M3, nearest, ties to even. A group that holds an
infinity or a NaN becomes NaNs only (0x7F) with scale 1: E4M3 has no infinity. A scale that has to
be a power of two is the smallest with amax <= 448 * scale, and the stored value is x / scale. The
kernels follow exactly these rules.
"""

from __future__ import annotations

import torch

from .block_scaled import E4M3_MAX, E4M3_NAN

GROUP_SIZE = 128
MIN_AMAX = 1e-4


def quantize_e4m3_float(
    x: torch.Tensor,
    *,
    powers_of_two: bool = False,
    whole_tokens: bool = False,
    group_size: int = GROUP_SIZE,
    token_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x` [..., K], K a multiple of 128, to (float8_e4m3fn [..., K], float32
    [..., K/128]). powers_of_two: whether the scales have to be such. whole_tokens: one scale for
    all K values, float32 [..., 1]. group_size: values per scale, a divisor of K. token_scale: that
    of all tokens, in place of those that follow from their values; larger values become 448 of it.

    >>> values, scales = quantize_e4m3_float(torch.full((128,), 3.5))
    >>> values[0].item(), scales.item()
    (448.0, 0.0078125)
    """
    if x.dim() == 0 or not x.shape[-1] or x.shape[-1] % GROUP_SIZE:
        raise ValueError(f"x must have a positive multiple of 128 columns; got {tuple(x.shape)}")
    if x.shape[-1] % group_size:
        raise ValueError(f"group_size must divide x's {x.shape[-1]} columns; got {group_size}")
    group_size = x.shape[-1] if whole_tokens else group_size
    groups = x.float().unflatten(-1, (x.shape[-1] // group_size, group_size))
    finite = groups.isfinite().all(dim=-1)
    amax = groups.abs().amax(dim=-1).clamp(min=MIN_AMAX)
    if powers_of_two:
        mantissa, exponent = (amax.double() / E4M3_MAX).frexp()  # mantissa from 0.5 up to 1
        exact = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
        scales = exact.float().where(finite, 1.0)
        factor = 1 / scales
    elif token_scale is not None:
        scales = torch.full_like(amax, token_scale)
        factor = 1 / scales
        scales = scales.where(finite, 1.0)
    else:
        scales = (amax * (1 / E4M3_MAX)).where(finite, 1.0)
        # Not a number divided by a tensor, which is a product with the rounded inverse.
        factor = torch.full_like(amax, E4M3_MAX) / amax
    scaled = groups * factor.unsqueeze(-1)
    if token_scale is not None:
        scaled = scaled.clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.where(finite.unsqueeze(-1), 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    values = values.where(finite.unsqueeze(-1), E4M3_NAN)
    return values.view(torch.float8_e4m3fn).reshape(x.shape), scales


def dequantize_e4m3_float(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The products of `values` [..., K] and their scales [..., K/128] or [..., 1], in float32, as
    `dtype`."""
    if values.dtype != torch.float8_e4m3fn:
        raise TypeError(f"values must be float8_e4m3fn; got {values.dtype}")
    num_groups = scales.shape[-1]
    groups = values.float().unflatten(-1, (num_groups, values.shape[-1] // num_groups))
    return (groups * scales.unsqueeze(-1)).flatten(-2).to(dtype)
