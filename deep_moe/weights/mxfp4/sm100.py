"""MXFP4 weights on SM100: beside E4M3 tokens a load unpacks 16 values to as many bytes, beside BF16
tokens the kernel decodes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.emulator.tensor_map import DataType
from deep_moe.targets.sm100.decoded import Sm100DecodedWeights, decoded_block_bytes
from deep_moe.targets.sm100.weights import Sm100Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.numerics import Numerics

    from ..layers import LayerWeights, MegaMoEWeights


class Sm100Mxfp4(Sm100Weights):
    weights = "mxfp4"
    token_format = "mxfp8"
    policy = "Mxfp4Weights"
    data_type = DataType.PACKED_16U4_ALIGN16B

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.int8

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm100.layout import transform_scaled

        transform_scaled(l1, l2, out)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import mxfp8_numerics

        from .format import FORMAT

        return mxfp8_numerics(FORMAT.dequantize)


class Sm100Mxfp4Bf16(Sm100DecodedWeights):
    weights = "mxfp4"
    policy = "Mxfp4Bf16Weights"
    decoded_block_bytes = decoded_block_bytes(2)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize)


KERNELS = (Sm100Mxfp4(), Sm100Mxfp4Bf16())
