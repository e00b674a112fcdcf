"""FP8 weights on SM100: the kernel of MXFP4, with E4M3 on both sides of the product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.targets.sm100.weights import Sm100Weights
from deep_moe.tensor_map import DataType

from .on_target import Fp8OnTarget

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.numerics import Numerics

    from ..layers import LayerWeights, MegaMoEWeights
    from .requantizing import Moved


class Sm100Fp8(Fp8OnTarget, Sm100Weights):
    token_format = "mxfp8"
    policy = "Fp8Weights"
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
        from deep_moe.targets.sm100.layout import transform_scaled

        from .requantizing import with_ue8m0_scales

        for expert_idx in range(l1.weight.shape[0]):
            transform_scaled(
                with_ue8m0_scales("l1_weights", l1, expert_idx, l1_moved),
                with_ue8m0_scales("l2_weights", l2, expert_idx, l2_moved),
                out.expert(expert_idx),
            )

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import mxfp8_numerics

        from .format import FORMAT

        return mxfp8_numerics(FORMAT.dequantize)


KERNELS = (Sm100Fp8(),)
