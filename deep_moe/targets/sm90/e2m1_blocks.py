"""E2M1 values in blocks that the SM90 kernel decodes to BF16 (decoded_blocks.py).

The kernel makes a product's word of a lane four registers of two BF16. With h = 0 or 1 for a row,
c = 0 or 1 for the first or second two values along k, and v = 0 or 1 for the first or second of
these, a value comes into half v of register 2*c + h. Its bits lie where BF16 has sign, the lowest
two bits of exponent and the highest of mantissa, 15, 8, 7 and 6, once the word is rotated left: by
6 for register 0, 2 for register 1, 12 for register 2, 0 for register 3
(include/deep_moe/formats/e2m1_to_bf16.cuh). Four such patterns do not fit into a word. So bit 8 of
register 1 comes by a rotation of 10. No other layout is decoded by fewer instructions.
"""

from __future__ import annotations

from .decoded_blocks import NibbleBlocks


class E2m1Blocks(NibbleBlocks):
    # Of a word's bits [h][c][v][4].
    lane_swaps = (
        (4, 0x0000430000004300),
        (12, 0x0000F4F00000F4F0),
        (2, 0x0300030003000300),
        (6, 0x01C801C801C801C8),
    )
