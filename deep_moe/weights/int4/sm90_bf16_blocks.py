"""INT4 weights as the SM90 kernel reads them where tokens are BF16
(deep_moe/targets/sm90/decoded_blocks.py).

A product's word of a lane has the codes of both its rows as nibbles. With v = 0 or 1 for the first
or second of two neighbours along k, and c = 0 or 1 for the first or second two of them, codes lie
as [v][c][h] from the highest bits: then both codes of two neighbours lie in BF16's lowest 8 bits,
after a shift by 8 those of the other c (include/deep_moe/formats/int4_to_bf16.cuh).

A multiplier is the BF16 scale of a group of 32, times 2^133 for the unit of BF16's lowest bits,
over the row's factor: 2^6 times the power of two of the row's largest scale, so that this one's
multiplier is from 2^127 on. Nothing is rounded. Scales of 128 values are repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_moe.targets.sm90.decoded_blocks import NibbleBlocks, Rows

from ..layers import in_words
from .format import group_size

MAX_SCALE = 2.0**121  # so that a row's factor is a float32
# Of a multiplier to its scale, over the row's factor.
_UNITS = 2.0**133
# Of a row's largest scale, so that its multiplier is the largest power of two of BF16.
_TOP_FACTOR = 2.0**6
_SMALLEST_NORMAL = 2.0**-126

if TYPE_CHECKING:
    from ..layers import LayerTensors


class Int4Blocks(NibbleBlocks):
    group = 32
    multiplier_dtype = torch.int16
    lane_swaps = ((12, 0x0000F0F00000F0F0),)  # from [h][c][v]

    def split(self, layer: LayerTensors, name: str, *, num_matrices: int) -> Rows:
        weight, sf = layer
        if bool((sf.abs() > MAX_SCALE).any()):
            raise ValueError(
                f"{name} must have scales of at most 2^121; got {sf.abs().max().item():.6g}"
            )
        words = in_words(weight, torch.int64)
        size = group_size(2 * weight.shape[1], sf.shape[1])
        factors = _factors(sf)
        multipliers = (sf.double() * (_UNITS / factors.double()).unsqueeze(-1)).bfloat16()
        repeated = multipliers.repeat_interleave(size // self.group, 1)
        return Rows(words.unsqueeze(-1), repeated.view(torch.int16), factors)

    def joined(self, rows: Rows, *, num_matrices: int) -> LayerTensors:
        multipliers = rows.multipliers.view(torch.bfloat16).double()
        scales = multipliers * (rows.factors.double() / _UNITS).unsqueeze(-1)
        return rows.words.flatten(1).view(torch.int8), scales.bfloat16()


BLOCKS = Int4Blocks()


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Of rows with such scales."""
    largest = scales.abs().amax(dim=1).float().clamp(min=_SMALLEST_NORMAL)
    exponents = largest.view(torch.int32) & 0x7F80_0000
    return exponents.view(torch.float32) * _TOP_FACTOR
