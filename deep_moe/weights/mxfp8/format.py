"""MXFP8 weights, as checkpoints call FP8 weights whose scales are UE8M0 per 32 values: E4M3 [E, N,
K] with int32 [E, N, K/128], four UE8M0 bytes in each, or uint8 or float8_e8m0fnu [E, N, K/32]."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import GROUP_SIZE, WORD_SIZE

from ..checks import check_layers
from ..fp8.format import Fp8
from ..layers import LayerWeights, WeightSizes

_BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


class Mxfp8(Fp8):
    name = "mxfp8"
    words = "a pair (E4M3 float8_e4m3fn, UE8M0 scales per 32), as deep_moe.quantize_mxfp8 gives it"

    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        return check_layers(
            l1, l2, values_per_byte=1, check_dtypes=_check_dtypes, check_scales=_check_scales
        )


FORMAT = Mxfp8()


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    weight, sf = layer
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}[0] must be float8_e4m3fn for mxfp8 weights; got {weight.dtype}")
    if sf.dtype not in (torch.int32, *_BYTE_DTYPES):
        raise TypeError(
            f"{name}[1] must be float8_e8m0fnu, uint8, or int32 with four UE8M0 bytes in each; got "
            f"{sf.dtype}"
        )


def _check_scales(
    name: str, sf: torch.Tensor, sizes: tuple[int, int, int], num_matrices: int
) -> None:
    num_experts, num_rows, num_values = sizes
    per_element = WORD_SIZE if sf.dtype == torch.int32 else GROUP_SIZE
    expected = (num_experts, num_rows, -(-num_values // per_element))
    if tuple(sf.shape) != expected:
        raise ValueError(
            f"{name} must hold one scale per {GROUP_SIZE} values, shape {expected}; got "
            f"{tuple(sf.shape)}"
        )
