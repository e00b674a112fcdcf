"""MXFP4 weights as the SM90 kernel reads them where tokens are BF16
(deep_moe/targets/sm90/decoded_blocks.py, e2m1_blocks.py).

The kernel decodes E2M1 to BF16 in registers, its scale included. A row's factor is the largest of
the scales of its 32-value groups, and each group has what its own is below that, as a power of two
that a decoded value is multiplied by. BF16 holds the product exactly while the group's scale is no
less than 2^-125 of the row's largest: 0.5 becomes 2^-126 there, the smallest normal number. A row
whose scales spread further is refused. Groups of zeros fit any scale.

A multiplier is a byte x for 2^(x - 127).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_moe.targets.sm90.decoded_blocks import Rows
from deep_moe.targets.sm90.e2m1_blocks import E2m1Blocks

from .sm90_e5m2_blocks import Tensors, is_zero_group

if TYPE_CHECKING:
    from ..layers import LayerTensors

MAX_SPREAD = 125  # log2 of a row's largest scale over its smallest
# Of E2M1 as it stands in the lowest bits of BF16's exponent, which makes it 2^-126 times as large,
# to what the row's largest scale gives.
TOP_MULTIPLIER = 127 + 126

_NAN_BYTE = 255


class Mxfp4Blocks(E2m1Blocks):
    group = 32

    def split(self, layer: LayerTensors, name: str, *, num_matrices: int) -> Rows:
        weight, sf = layer
        words = weight.contiguous().view(torch.int64)
        scales = sf.contiguous().view(torch.uint8)
        top, multipliers = _split_scales(words, scales, name)
        return Rows(words.unsqueeze(-1), multipliers, (top.int() << 23).view(torch.float32))

    def joined(self, rows: Rows, *, num_matrices: int) -> LayerTensors:
        top = (rows.factors.view(torch.int32) >> 23).to(torch.uint8)
        scales = rows.multipliers + (top - TOP_MULTIPLIER).unsqueeze(-1)  # of bytes, which wrap
        return rows.words.flatten(1).view(torch.int8), scales.view(torch.int32)


BLOCKS = Mxfp4Blocks()


def _split_scales(words: torch.Tensor, scales: torch.Tensor, name: str) -> Tensors:
    """UE8M0 bytes [N, K/32] as those of the rows' factors, uint8 [N], and of what groups are
    multiplied by, uint8 [N, K/32]."""
    lowest, highest = scales.amin(dim=-1), scales.amax(dim=-1)
    top = highest.clamp(min=1)  # its factor is a normal number
    wide = (top - lowest > MAX_SPREAD).nonzero().flatten()
    if wide.numel():
        top[wide] = _top_of_wide_rows(words[wide], scales[wide], wide, name)
    distances = top.unsqueeze(-1).int() - scales.int()
    return top, (TOP_MULTIPLIER - distances.clamp(0, MAX_SPREAD)).to(torch.uint8)


def _top_of_wide_rows(
    words: torch.Tensor, scales: torch.Tensor, row_idx: torch.Tensor, name: str
) -> torch.Tensor:
    """For rows that fit only if the scales of zeros are let go. row_idx: which rows."""
    is_zero = is_zero_group(words.view(torch.int32), scales.shape[-1])
    lowest = scales.masked_fill(is_zero, _NAN_BYTE).amin(dim=-1).int()
    top = scales.masked_fill(is_zero, 0).amax(dim=-1).clamp(min=1)
    spreads = (top.int() - lowest > MAX_SPREAD).nonzero()
    if spreads.numel():
        first = int(spreads[0])
        low, high = int(lowest[first]) - 127, int(top[first]) - 127
        raise ValueError(
            f"{name}, row {int(row_idx[first])} must have scales within a factor of "
            f"2^{MAX_SPREAD} of each other for sm_90a and tokens in BF16; got 2^{low} to 2^{high}"
        )
    return top
