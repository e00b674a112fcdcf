"""MXFP4 weights as the SM90 kernel reads them where tokens are BF16
(deep_moe/targets/sm90/decoded_blocks.py, e2m1_blocks.py).

The kernel decodes E2M1 to BF16 in registers, where it stands 2^126 times too low, and multiplies it
by its group's scale (deep_moe/targets/sm90/ue8m0_scales.py). BF16 holds the product exactly while
the group's scale is no less than 2^-125 of the row's largest: 0.5 becomes 2^-126 there. A row whose
scales spread further is refused. Groups of zeros fit any scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_moe.targets.sm90.decoded_blocks import Rows
from deep_moe.targets.sm90.e2m1_blocks import E2m1Blocks
from deep_moe.targets.sm90.ue8m0_scales import PowersOfTwo

from ..layers import in_words
from .sm90_e5m2_blocks import is_zero_group

if TYPE_CHECKING:
    from ..layers import LayerTensors

# 0.5 times the smallest multiplier is BF16's smallest normal number.
SCALES = PowersOfTwo(top_multiplier=127 + 126, max_spread=125)


class Mxfp4Blocks(E2m1Blocks):
    group = 32

    def split(self, layer: LayerTensors, name: str, *, num_matrices: int) -> Rows:
        weight, sf = layer
        words = in_words(weight, torch.int64)
        scales = sf.contiguous().view(torch.uint8)

        def is_zero(rows: torch.Tensor) -> torch.Tensor:
            return is_zero_group(words[rows].view(torch.int32), scales.shape[-1])

        factors, multipliers = SCALES.split(scales, is_zero, name)
        return Rows(words.unsqueeze(-1), multipliers, factors)

    def joined(self, rows: Rows, *, num_matrices: int) -> LayerTensors:
        scales = SCALES.joined(rows.factors, rows.multipliers)
        return rows.words.flatten(1).view(torch.int8), scales.view(torch.int32)


BLOCKS = Mxfp4Blocks()
