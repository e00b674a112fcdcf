"""INT4 weights on SM100, which the kernel decodes to BF16 beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.targets.sm100.decoded import Sm100DecodedWeights, decoded_block_bytes

from .rounding import rounded

if TYPE_CHECKING:
    from deep_moe.formats.numerics import Numerics


class Sm100Int4Bf16(Sm100DecodedWeights):
    weights = "int4"
    policy = "Int4Bf16Weights"
    larger_scale_blocks = ((1, 128),)
    decoded_block_bytes = decoded_block_bytes(4)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        return bf16_numerics(rounded)


KERNELS = (Sm100Int4Bf16(),)
