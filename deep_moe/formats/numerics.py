"""Where kernels round, for references: how tokens, weights and Linear1's output become the operands
of the tensor cores.

Activations are scaled as the formats say, one scale per 32 values (`mxfp8_numerics`). The SM90
kernel differs in two places, because its tensor cores have no scales (`sm90_numerics`). A target's
weights (deep_moe/weights) name the numerics that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import nvfp4
from .block_scaled import (
    GROUP_SIZE,
    dequantize_e4m3_ue8m0,
    pack_e2m1_codes,
    quantize_e4m3_groups,
    ue8m0_to_float,
    unpack_e2m1,
    unpack_ue8m0,
)

FP32_SUM_BITS = 24
HOPPER_SUM_BITS = 13
SM90_SCALE_BLOCK = 128  # intermediate values that share a scale
SM90_MIN_SCALE_BYTE = 67  # 2^-60, so that sums can be rescaled in FP32
SM90_MAX_SCALE_BYTE = 247  # the largest that quantizing to E4M3 asks for
SM90_SMALLEST_AMAX = 2.0**-3  # of a token's scale; smaller blocks have a scale of their own


Dequantize = Callable[[tuple[torch.Tensor, ...], int], torch.Tensor]


@dataclass(frozen=True)
class ScaledOutput:
    """Of which type Linear1's output is, and its scales: values: float64 numbers that blocks,
    float32 [n, blocks, values], become with bytes of scales [n, blocks], without these. scales:
    what bytes stand for, float64. has_powers: whether that is powers of two."""

    values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scales: Callable[[torch.Tensor], torch.Tensor]
    has_powers: bool


def _e4m3_values(blocks: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    return quantize_e4m3_groups(blocks, scale_bytes=scale_bytes)[0].float().double()


E4M3_OUTPUT = ScaledOutput(_e4m3_values, ue8m0_to_float, has_powers=True)


@dataclass(frozen=True)
class Numerics:
    """How activations become what the tensor cores multiply.

    tokens: a token's E4M3 values [n, H] and packed scales as float64. weights: one expert's
    tensors of a layer, as checkpoints have them, which are so many matrices one below the other, as
    float64 [N, K]. scale_block: how many values of Linear1's output share a scale. scale_bytes:
    these scales, as bytes [n, blocks], from the blocks' largest magnitudes, float32 [n,
    blocks], and the routing weights [n]. A larger magnitude never has a smaller scale. Where both
    are None, Linear1's output is BF16, without scales. sum_bits: what
    hardware keeps of a sum of products, over `sum_block` values along K or, if None, all of them;
    the reference keeps all. sum_products: that one instruction adds to a sum.
    multiplies_block_scales: whether such sums are multiplied by a product of two scales, which is
    rounded to FP32. rounds_row_factors: whether the sum of a row is multiplied in FP32 by a factor
    that is no power of two. output: how Linear1's output is scaled. weighs_results: whether
    routing weights come behind Linear2, in FP32, so that Linear1's output is that of weight 1.
    """

    tokens: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weights: Dequantize
    scale_block: int | None
    scale_bytes: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    sum_bits: int
    sum_block: int | None = None
    sum_products: int = GROUP_SIZE
    multiplies_block_scales: bool = False
    rounds_row_factors: bool = False
    output: ScaledOutput = E4M3_OUTPUT
    weighs_results: bool = False

    def requantize(self, activated: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [n, I] after the activation, with its routing weights [n] in it, through E4M3,
        E2M1 or BF16: float64 [n, I]."""
        if self.scale_block is None or self.scale_bytes is None:
            return activated.to(torch.bfloat16).double()
        blocks = self.blocks(activated, self.scale_block)
        scale_bytes = self.scale_bytes(blocks.abs().amax(dim=-1), weights)
        scales = self.output.scales(scale_bytes).unsqueeze(-1)
        scaled = self.output.values(blocks, scale_bytes) * scales
        return scaled.flatten(-2)[..., : activated.shape[-1]]

    @staticmethod
    def blocks(values: torch.Tensor, scale_block: int) -> torch.Tensor:
        """[n, I] as [n, blocks, scale_block], the last filled with zeros."""
        missing = -values.shape[-1] % scale_block
        whole = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return whole.unflatten(-1, (-1, scale_block))


def exact_tokens(x: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
    """Tokens with a UE8M0 scale for every 32 values, exact in float64."""
    return dequantize_e4m3_ue8m0(x, x_sf, torch.float64)


def float_scaled_tokens(x: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
    """Tokens with a float32 scale for every 128 values, or for all, exact in float64."""
    return x.float().double() * x_sf.double().repeat_interleave(x.shape[-1] // x_sf.shape[-1], -1)


def smallest_scale_bytes(amax: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
    """The smallest scale that holds each block, whatever the routing weight."""
    _, scale_bytes = quantize_e4m3_groups(amax.unsqueeze(-1))
    return scale_bytes


def fold_token_scales(x: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
    """A token keeps its largest group scale; the other groups are brought to it in E4M3, rounded to
    nearest even. That changes values which thereby become subnormal, below 2^-6 of that scale."""
    scale_bytes = unpack_ue8m0(x_sf)[..., : x.shape[-1] // GROUP_SIZE].int()
    largest = scale_bytes.amax(dim=-1, keepdim=True)
    ratios = torch.exp2((scale_bytes - largest).double()).repeat_interleave(GROUP_SIZE, dim=-1)
    # float32 holds every product that E4M3 does not round to zero.
    folded = (x.float().double() * ratios).float().to(torch.float8_e4m3fn)
    return folded.float().double() * ue8m0_to_float(largest)


def sm90_token_scale_bytes(weights: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes [n] of 2^(floor(log2 |weight|) - 1), within what SM90 uses."""
    exponents = (weights.float().abs().view(torch.int32) >> 23) - 1
    return exponents.clamp(SM90_MIN_SCALE_BYTE, SM90_MAX_SCALE_BYTE)


def sm90_scale_bytes(amax: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Blocks that lie well in E4M3's range by the token's scale, which follows from its routing
    weight, have that one, the others the smallest that holds them."""
    token_bytes = sm90_token_scale_bytes(weights).unsqueeze(-1)
    _, own_bytes = quantize_e4m3_groups(amax.unsqueeze(-1), min_scale_byte=SM90_MIN_SCALE_BYTE)
    is_large_enough = amax.double() >= SM90_SMALLEST_AMAX * ue8m0_to_float(token_bytes)
    fits = (own_bytes <= token_bytes) & is_large_enough | (amax == 0)
    return torch.where(fits, token_bytes, own_bytes)


def mxfp8_numerics(weights: Dequantize) -> Numerics:
    """Of tensor cores that apply a scale for every 32 values."""
    return Numerics(exact_tokens, weights, GROUP_SIZE, smallest_scale_bytes, FP32_SUM_BITS)


def sm90_numerics(weights: Dequantize) -> Numerics:
    """Of SM90's E4M3 products, whose tensor cores know no scales."""
    return Numerics(fold_token_scales, weights, SM90_SCALE_BLOCK, sm90_scale_bytes, HOPPER_SUM_BITS)


def bf16_numerics(weights: Dequantize, *, rounds_row_factors: bool = False) -> Numerics:
    """Of products of BF16, which have no scales."""
    return Numerics(
        lambda x, _: x.double(),
        weights,
        None,
        None,
        FP32_SUM_BITS,
        sum_products=16,
        rounds_row_factors=rounds_row_factors,
    )


def _nvfp4_scale_bytes(amax: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
    return nvfp4.group_scale_bytes(amax, torch.full_like(amax, 1 / nvfp4.LINEAR2_SCALE))


def _nvfp4_values(blocks: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    inverse = torch.full_like(blocks[..., 0], 1 / nvfp4.LINEAR2_SCALE)
    codes = nvfp4.quantize_groups(blocks, scale_bytes, inverse)
    return unpack_e2m1(pack_e2m1_codes(codes), torch.float64)


def _nvfp4_scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    return nvfp4.e4m3_to_double(scale_bytes) * nvfp4.LINEAR2_SCALE


def nvfp4_numerics(weights: Dequantize) -> Numerics:
    """Of products of E2M1 with E4M3 scales per 16, behind which floats of rows and tokens come."""
    return Numerics(
        lambda x, x_sf: nvfp4.dequantize_nvfp4_tokens(x, x_sf, torch.float64),
        weights,
        nvfp4.GROUP_SIZE,
        _nvfp4_scale_bytes,
        FP32_SUM_BITS,
        sum_products=64,
        multiplies_block_scales=True,
        rounds_row_factors=True,
        output=ScaledOutput(_nvfp4_values, _nvfp4_scales, has_powers=False),
        weighs_results=True,
    )
