"""INT4 weights on SM90, which the kernel decodes to BF16 beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.targets.sm90.decoded import (
    BF16_DECODED_TILES,
    Sm90DecodedWeights,
    bf16_decoded_kind,
)

from .rounding import rounded

if TYPE_CHECKING:
    from deep_moe.formats.numerics import Numerics


# With 176 rows, too, ptxas has too few registers to overlap the products with anything else.
_TILES = tuple(tile for tile in BF16_DECODED_TILES if tile != (176, 176))


class Sm90Int4Bf16(Sm90DecodedWeights):
    weights = "int4"
    policy = "Int4Bf16Weights"
    larger_scale_blocks = ((1, 128),)
    kind = bf16_decoded_kind(9216, _TILES)
    fuzz_tiles = tuple(
        {**tile, "block_m": min(tile["block_m"], 160)} for tile in Sm90DecodedWeights.fuzz_tiles
    )

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        return bf16_numerics(rounded)


KERNELS = (Sm90Int4Bf16(),)
