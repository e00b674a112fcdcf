"""MXFP4 weights on SM100: a load unpacks 16 values to as many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.jit.tensor_map import DataType

from .sm100_weights import Sm100Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.weights import LayerWeights, MegaMoEWeights
    from deep_moe.trial.reference import Numerics


class Sm100Mxfp4(Sm100Weights):
    format = "mxfp4"
    policy = "Mxfp4Weights"
    data_type = DataType.PACKED_16U4_ALIGN16B

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.int8

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.formats.weights import sm100_transform

        sm100_transform(l1, l2, out)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.trial.reference import MXFP8

        return MXFP8
