"""E2M1 values in blocks that the SM90 kernel decodes to BF16 (decoded_blocks.py).

A product's word of a lane has the values of both its rows, each value cut in two pairs of bits:
sign and upper exponent bit, lower exponent bit and mantissa. With v = 0 or 1 for the first or
second of two neighbours along k, and c = 0 or 1 for the first or second two of them, pairs lie as
[h][v][upper][c] from the highest bits, so that the kernel makes byte selectors of both pairs of a c
at once (include/deep_moe/formats/e2m1_to_bf16.cuh).
"""

from __future__ import annotations

import torch

from .decoded_blocks import DecodedBlocks, swap_across, swap_bits

# Of two rows the 8 bytes of 16 values each: [h][c][q] bytes of two values. First to [q / 2][c]
# [h][q % 2] by an exchange between the two words, then, in each, to [q / 2][q % 2][h][c].
_ACROSS, _ACROSS_BITS = 16, 0x0000FFFF0000FFFF
_TO_LANES = (24, 0x00000000FF00FF00)
# Of a row's 16 bits pairs of bits [c][v][upper], to [v][upper][c].
_TO_SELECTORS = ((6, 0x00CC00CC00CC00CC), (4, 0x00F000F000F000F0))
_SWAPS = (_TO_LANES, *_TO_SELECTORS)


class E2m1Blocks(DecodedBlocks):
    value_bits = 4

    def to_lanes(self, words: torch.Tensor) -> torch.Tensor:
        # [.., product, h], and then of a product's two words q / 2.
        made = words.squeeze(-1).transpose(-1, -2).contiguous()
        swap_across(made, _ACROSS, _ACROSS_BITS)
        swap_bits(made, _SWAPS)
        return made.view(torch.int32).transpose(-1, -2)

    def to_words(self, lanes: torch.Tensor) -> torch.Tensor:
        made = lanes.transpose(-1, -2).contiguous().view(torch.int64)
        swap_bits(made, reversed(_SWAPS))
        swap_across(made, _ACROSS, _ACROSS_BITS)
        return made.transpose(-1, -2).unsqueeze(-1)
