"""INT4 weights as the SM90 kernel reads them where tokens are BF16
(deep_moe/targets/sm90/decoded_blocks.py).

A product's word of a lane has the codes of both its rows as nibbles. With v = 0 or 1 for the first
or second of two neighbours along k, and c = 0 or 1 for the first or second two of them, codes lie
as [v][c][h] from the highest bits: whatever shift by 4*(2*c + h) brings both of two neighbours to
where BF16 numbers from 128 to 143 have them
(include/deep_moe/weights/int4/sm90.cuh).

A multiplier is the BF16 scale of a group of 32. Scales of 128 values are repeated. Rows have a
factor of 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_moe.targets.sm90.decoded_blocks import NibbleBlocks, Rows

from .format import group_size

MAX_SCALE = 2.0**124  # so that BF16 holds 8 times as much

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
                f"{name} must have scales of at most 2^124; got {sf.abs().max().item():.6g}"
            )
        words = weight.contiguous().view(torch.int64)
        size = group_size(2 * weight.shape[1], sf.shape[1])
        scales = sf.repeat_interleave(size // self.group, 1).contiguous().view(torch.int16)
        return Rows(words.unsqueeze(-1), scales, sf.new_ones(words.shape[0], dtype=torch.float32))

    def joined(self, rows: Rows, *, num_matrices: int) -> LayerTensors:
        return rows.words.flatten(1).view(torch.int8), rows.multipliers.view(torch.bfloat16)


BLOCKS = Int4Blocks()
