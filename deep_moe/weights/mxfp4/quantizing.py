"""Quantizing whole tensors of weights to MXFP4, and back. The format and its rounding are those of
deep_moe/formats/block_scaled.py."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import dequantize_e2m1_ue8m0, quantize_e2m1_ue8m0
from deep_moe.formats.mx import by_matrix, require_dtype

from ..layers import LayerWeights


def quantize_mxfp4(x: torch.Tensor) -> LayerWeights:
    """Quantize weights `x` [..., K] to the pair that `transform_weights_for_mega_moe` takes: packed
    E2M1 int8 [..., K/2], two values per byte, and UE8M0 scales int32 [..., K/128] rounded up, four
    per word.

    Args:
        x: bfloat16, float16 or float32 without NaN and infinity: [E, 2*I, H] with the rows of gate
            before those of up for Linear1, [E, H, I] for Linear2. K, the dimension that products
            sum over, is a multiple of 32. The scale of 32 values is the smallest power of two at
            which the largest of them is at most 6. Scaled values are rounded to the nearest of 0,
            0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Examples:
        >>> packed, sf = quantize_mxfp4(torch.full((2, 128), 0.75))
        >>> packed.shape, sf.shape, dequantize_mxfp4(packed, sf)[0, 0].item()
        (torch.Size([2, 64]), torch.Size([2, 1]), 0.75)

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    return LayerWeights(*by_matrix(quantize_e2m1_ue8m0, x=x))


def dequantize_mxfp4(
    packed: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weights [..., K] that packed E2M1 int8 [..., K/2] and scales int32 [..., K/128] stand
    for. bfloat16 and float32 hold them exactly, but where they are below the smallest number.

    Args:
        packed: int8 [..., K/2], two E2M1 values in each byte.
        sf: int32 [..., K/128], four UE8M0 bytes in each.
        dtype: of the result.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    require_dtype(dtype)
    return by_matrix(lambda a, b: (dequantize_e2m1_ue8m0(a, b, dtype),), packed=packed, sf=sf)[0]
