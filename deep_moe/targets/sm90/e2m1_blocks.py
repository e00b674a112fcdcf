"""E2M1 values in blocks that the SM90 kernel decodes to BF16 (decoded_blocks.py).

A product's word of a lane has the values of both its rows, each value cut in two pairs of bits:
sign and upper exponent bit, lower exponent bit and mantissa. With v = 0 or 1 for the first or
second of two neighbours along k, and c = 0 or 1 for the first or second two of them, pairs lie as
[h][v][upper][c] from the highest bits, so that the kernel makes byte selectors of both pairs of a c
at once (include/deep_moe/formats/e2m1_to_bf16.cuh).
"""

from __future__ import annotations

from .decoded_blocks import NibbleBlocks


class E2m1Blocks(NibbleBlocks):
    # Of a row's 16 bits pairs of bits [c][v][upper], to [v][upper][c].
    lane_swaps = ((6, 0x00CC00CC00CC00CC), (4, 0x00F000F000F000F0))
