"""NVFP4 activations: E2M1 values with an E4M3 scale for every 16 of them, beside a float32: a
token's own scale, or a constant of Linear1's output.

With the float f, a group's scale s is that of E4M3 nearest to amax / (6 * f), at most 448, and the
stored value is x / (s * f) rounded to E2M1, both to nearest, ties to even, at most 6. In float32,
each operation rounded:

    inverse = 1 / f
    s = e4m3((amax * inverse) * (1/6))
    value = e2m1(x * (inverse * (1 / s))), 0 where s is 0

A token's scale is amax * (1/2688) of all its values, so that the largest one becomes 6 * 448. A
token of magnitudes below 2^-100 is quantized as if one of that were in it. E2M1 has no NaN: a group
with an infinity or a NaN gets a scale that is NaN, and so does a token that holds one.

The kernels follow exactly these rules.
"""

from __future__ import annotations

import torch

from .block_scaled import E4M3_MAX, E4M3_NAN, nearest_e2m1_codes, pack_e2m1_codes, unpack_e2m1

GROUP_SIZE = 16
GROUPS_PER_WORD = 4  # E4M3 bytes in an int32, the lowest group in the lowest byte
WORD_SIZE = GROUP_SIZE * GROUPS_PER_WORD
MIN_TOKEN_AMAX = 2.0**-100
# Of Linear1's output. Groups of up to 672 keep their largest value, those below 0.0015 become zero.
LINEAR2_SCALE = 0.25
_LARGEST = 6.0 * E4M3_MAX
_E2M1_OF_NAN = 7


def quantize_nvfp4_tokens(
    x: torch.Tensor, token_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations `x` [..., K] to what a buffer's `x` and `x_sf` hold with token_format
    "nvfp4": packed E2M1 uint8 [..., K/2], two values per byte, and int32 [..., 1 + K/64], rounded
    up: the bits of the token's float32 scale, then words of four E4M3 scales, each of 16 values.

    Args:
        x: bfloat16, float16 or float32, K a multiple of 32.
        token_scale: one positive scale for all tokens, as a checkpoint's "input_scale"; larger
            values become 2688 times it. By default each token's scale is its largest magnitude /
            2688.

    Raises:
        TypeError: x has another dtype.
        ValueError: x has another size, or token_scale is not allowed.

    Example:
        >>> packed, sf = quantize_nvfp4_tokens(torch.full((1, 64), 2688.0))
        >>> packed.shape, sf.shape, sf[0, 0].view(torch.float32).item()
        (torch.Size([1, 32]), torch.Size([1, 2]), 1.0)
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"x must be float32, bfloat16 or float16; got {x.dtype}")
    if x.dim() == 0 or not x.shape[-1] or x.shape[-1] % 32:
        raise ValueError(f"x must have a positive multiple of 32 columns; got {tuple(x.shape)}")
    if token_scale is not None and not 0 < token_scale < float("inf"):
        raise ValueError(f"token_scale must be positive and finite; got {token_scale}")
    values = x.float()
    finite = values.isfinite().all(dim=-1)
    if token_scale is None:
        amax = values.abs().amax(dim=-1).clamp(min=MIN_TOKEN_AMAX)
        scales = amax * torch.tensor(1 / _LARGEST, dtype=torch.float32)
    else:
        scales = torch.full_like(values[..., 0], token_scale)
    inverse = _inverse(scales).where(finite, 0.0)
    groups = values.unflatten(-1, (-1, GROUP_SIZE))
    group_inverse = inverse.unsqueeze(-1).expand(groups.shape[:-1])
    scale_bytes = group_scale_bytes(groups.abs().amax(dim=-1), group_inverse)
    codes = quantize_groups(groups, scale_bytes, group_inverse).flatten(-2)
    words = pack_scale_bytes(scale_bytes)
    bits = scales.where(finite, torch.nan).view(torch.int32)
    nan_bits = torch.full_like(bits, 0x7FFFFFFF)
    sf = torch.cat([bits.where(finite, nan_bits).unsqueeze(-1), words], dim=-1)
    return pack_e2m1_codes(codes).view(torch.uint8), sf


def dequantize_nvfp4_tokens(
    packed: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The activations that packed values and their scales stand for. Exact in float64.

    Args:
        packed: E2M1 uint8 [..., K/2].
        sf: int32 [..., 1 + K/64], rounded up, as `quantize_nvfp4_tokens` gives it.
        dtype: of the result [..., K].
    """
    values = unpack_e2m1(packed.view(torch.int8), torch.float64)
    num_words = -(-values.shape[-1] // WORD_SIZE)
    expected = (*values.shape[:-1], 1 + num_words)
    if sf.dtype != torch.int32 or tuple(sf.shape) != expected:
        raise ValueError(f"sf must be int32 {expected}; got {sf.dtype} {tuple(sf.shape)}")
    token_scales = sf[..., :1].contiguous().view(torch.float32).double()
    scale_bytes = sf[..., 1:].contiguous().view(torch.uint8)[..., : values.shape[-1] // GROUP_SIZE]
    groups = values.unflatten(-1, (-1, GROUP_SIZE)) * e4m3_to_double(scale_bytes).unsqueeze(-1)
    return (groups.flatten(-2) * token_scales).to(dtype)


def group_scale_bytes(amax: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """E4M3 codes uint8 of groups, by their largest magnitudes, float32, and the inverses of the
    floats beside them."""
    wanted = (amax * inverse) * torch.tensor(1 / 6, dtype=torch.float32)
    codes = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.where(amax.isfinite(), E4M3_NAN)


def quantize_groups(
    groups: torch.Tensor, scale_bytes: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """E2M1 codes uint8 [..., 16] of float32 groups with these scales."""
    scales = scale_bytes.view(torch.float8_e4m3fn).float()
    factors = inverse * _inverse(scales).where(scales != 0, 0.0)
    scaled = groups * factors.unsqueeze(-1)
    return nearest_e2m1_codes(scaled).where(~scaled.isnan(), _E2M1_OF_NAN)


def pack_scale_bytes(scale_bytes: torch.Tensor) -> torch.Tensor:
    """E4M3 codes uint8 [..., K/16] in words int32 [..., K/64], rounded up: zeros fill the last."""
    missing = -scale_bytes.shape[-1] % GROUPS_PER_WORD
    whole = torch.nn.functional.pad(scale_bytes, (0, missing))
    return whole.contiguous().view(torch.int32)


def e4m3_to_double(codes: torch.Tensor) -> torch.Tensor:
    """What E4M3 codes uint8 stand for."""
    return codes.contiguous().view(torch.float8_e4m3fn).float().double()


def _inverse(x: torch.Tensor) -> torch.Tensor:
    """1 / x. Not a number divided by a tensor, which is a product with the rounded inverse."""
    return torch.ones_like(x) / x
