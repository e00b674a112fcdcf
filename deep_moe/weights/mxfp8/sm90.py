"""MXFP8 weights on SM90, which the kernel decodes to BF16 beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.targets.sm90.decoded import Sm90DecodedWeights, bf16_decoded_kind

if TYPE_CHECKING:
    from deep_moe.formats.numerics import Numerics
    from deep_moe.targets.sm90.decoded_blocks import DecodedBlocks


class Sm90Mxfp8Bf16(Sm90DecodedWeights):
    weights = "mxfp8"
    policy = "Mxfp8Bf16Weights"
    kind = bf16_decoded_kind(16896)

    @property
    def blocks(self) -> DecodedBlocks:
        from .sm90_bf16_blocks import BLOCKS

        return BLOCKS

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize)


KERNELS = (Sm90Mxfp8Bf16(),)
