"""INT4 weights on SM90, which the kernel decodes to BF16 beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.targets.sm90.decoded import Sm90DecodedWeights, bf16_decoded_kind

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.numerics import Numerics
    from deep_moe.targets.sm90.decoded_blocks import DecodedBlocks

    from ..layers import LayerTensors


class Sm90Int4Bf16(Sm90DecodedWeights):
    weights = "int4"
    policy = "Int4Bf16Weights"
    kind = bf16_decoded_kind(9216)

    @property
    def blocks(self) -> DecodedBlocks:
        from .sm90_bf16_blocks import BLOCKS

        return BLOCKS

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        return bf16_numerics(_rounded)


def _rounded(layer: LayerTensors, num_matrices: int) -> torch.Tensor:
    """A code times its scale is rounded to BF16."""
    import torch

    from .format import FORMAT

    return FORMAT.dequantize(layer, num_matrices).to(torch.bfloat16).double()


KERNELS = (Sm90Int4Bf16(),)
