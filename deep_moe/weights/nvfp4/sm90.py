"""NVFP4 weights on SM90, which the kernel decodes to BF16 beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.targets.sm90.decoded import Sm90DecodedWeights, bf16_decoded_kind

if TYPE_CHECKING:
    from deep_moe.formats.numerics import Numerics


class Sm90Nvfp4Bf16(Sm90DecodedWeights):
    weights = "nvfp4"
    policy = "Nvfp4Bf16Weights"
    scale_block = (1, 16)
    kind = bf16_decoded_kind(9216)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize, rounds_row_factors=True)


KERNELS = (Sm90Nvfp4Bf16(),)
