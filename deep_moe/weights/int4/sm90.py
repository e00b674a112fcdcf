"""INT4 weights on SM90, which the kernel decodes to BF16 beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.targets.sm90.decoded import Sm90DecodedWeights, bf16_decoded_kind

from .rounding import rounded

if TYPE_CHECKING:
    from deep_moe.formats.numerics import Numerics


class Sm90Int4Bf16(Sm90DecodedWeights):
    weights = "int4"
    policy = "Int4Bf16Weights"
    larger_scale_blocks = ((1, 128),)
    kind = bf16_decoded_kind(9216)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        return bf16_numerics(rounded)


KERNELS = (Sm90Int4Bf16(),)
