"""FP8 weights on SM100: the kernel of MXFP4, with E4M3 on both sides of the product."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deep_moe.jit.tensor_map import DataType

from .fp8 import Fp8OnTarget
from .sm100_weights import Sm100Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.fp8 import Moved
    from deep_moe.formats.weights import LayerWeights, MegaMoEWeights
    from deep_moe.trial.reference import Numerics


class Sm100Fp8(Fp8OnTarget, Sm100Weights):
    scale_words = "UE8M0 scales per 32"
    data_type = DataType.UINT8

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float8_e4m3fn

    def _lay_out(
        self,
        l1: LayerWeights,
        l2: LayerWeights,
        out: MegaMoEWeights,
        l1_moved: Moved | None,
        l2_moved: Moved | None,
    ) -> None:
        from deep_moe.formats.fp8 import with_ue8m0_scales
        from deep_moe.formats.weights import sm100_transform

        for expert_idx in range(l1.weight.shape[0]):
            sm100_transform(
                with_ue8m0_scales("l1_weights", l1, expert_idx, l1_moved),
                with_ue8m0_scales("l2_weights", l2, expert_idx, l2_moved),
                out.expert(expert_idx),
            )

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.fp8 import FORMAT
        from deep_moe.trial.reference import MXFP8

        return dataclasses.replace(MXFP8, weights=FORMAT.dequantize)
