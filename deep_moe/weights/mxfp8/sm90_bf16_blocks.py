"""MXFP8 weights as the SM90 kernel reads them where tokens are BF16
(deep_moe/targets/sm90/decoded_blocks.py, ue8m0_scales.py).

A product's word of a lane has the bytes of both its rows: with v = 0 or 1 for the first or second
of two neighbours along k, and c = 0 or 1 for the first or second two of them, they lie as
[h][c][v], the first lowest. E4M3 becomes BF16 by a shift, which makes it 2^-120 times as large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_moe.formats.block_scaled import E4M3_NAN
from deep_moe.targets.sm90.decoded_blocks import DecodedBlocks, Rows
from deep_moe.targets.sm90.ue8m0_scales import PowersOfTwo

from ..fp8.format import scale_bytes_of
from ..layers import in_words

if TYPE_CHECKING:
    from ..layers import LayerTensors

# The smallest value, 2^-9 in units of the row's factor, times the smallest multiplier is BF16's
# smallest normal number.
SCALES = PowersOfTwo(top_multiplier=127 + 120, max_spread=117)


class Mxfp8Blocks(DecodedBlocks):
    value_bits = 8
    group = 32

    def split(self, layer: LayerTensors, name: str, *, num_matrices: int) -> Rows:
        weight, sf = layer
        values = weight.contiguous().view(torch.uint8)
        scales = scale_bytes_of(sf)[..., : values.shape[1] // self.group]

        def is_zero(rows: torch.Tensor) -> torch.Tensor:
            groups = values[rows].unflatten(-1, (-1, self.group))
            return ((groups & E4M3_NAN) == 0).all(dim=-1)

        factors, multipliers = SCALES.split(scales, is_zero, name)
        words = in_words(values, torch.int64).unflatten(1, (-1, 2))
        return Rows(words, multipliers, factors)

    def joined(self, rows: Rows, *, num_matrices: int) -> LayerTensors:
        scales = SCALES.joined(rows.factors, rows.multipliers)
        return rows.words.flatten(1).view(torch.float8_e4m3fn), scales.view(torch.int32)

    def to_lanes(self, words: torch.Tensor) -> torch.Tensor:
        pairs = words.contiguous().view(torch.int16).unflatten(-1, (2, 4))  # h, product, c, q
        return (
            pairs.movedim(-1, -4).movedim(-2, -3).contiguous().flatten(-2).view(torch.int64)[..., 0]
        )

    def to_words(self, lanes: torch.Tensor) -> torch.Tensor:
        pairs = lanes.contiguous().unsqueeze(-1).view(torch.int16).unflatten(-1, (2, 2))
        # q, product, h, c
        return pairs.movedim(-2, -3).movedim(-4, -1).contiguous().flatten(-2).view(torch.int64)


BLOCKS = Mxfp8Blocks()
