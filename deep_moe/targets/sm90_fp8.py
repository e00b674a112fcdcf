"""FP8 weights on SM90, with a scale for every 128 x 128."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deep_moe.formats.weight_formats import FLOAT_TOKEN_SCALES

from .fp8 import Fp8OnTarget
from .sm90_weights import Sm90Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.fp8 import Moved
    from deep_moe.formats.weights import LayerWeights, MegaMoEWeights
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.trial.reference import Numerics


class Sm90Fp8(Fp8OnTarget, Sm90Weights):
    scale_words = "float32 scales per 128 x 128"
    scale_block = (128, 128)
    token_policies = {FLOAT_TOKEN_SCALES: "Fp8WeightsFloatScaledTokens"}  # noqa: RUF012
    # Few stages, for a small case never comes round the ring of the default. CTAs by themselves,
    # and in clusters that share weights.
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 4, "cluster_size": 2},
        {"block_m": 88, "num_stages": 3},
        {"block_m": 128, "num_stages": 2},
        {"block_m": 40, "num_stages": 3, "cluster_size": 2},
    )

    def _lay_out(
        self,
        l1: LayerWeights,
        l2: LayerWeights,
        out: MegaMoEWeights,
        l1_moved: Moved | None,
        l2_moved: Moved | None,
    ) -> None:
        from deep_moe.formats.fp8 import with_block_scales
        from deep_moe.formats.sm90_fp8_weights import lay_out_expert
        from deep_moe.formats.weights import LayerWeights

        for expert_idx in range(l1.weight.shape[0]):
            own_out = out.expert(expert_idx)
            for name, layer, to, moved in (
                ("l1_weights", l1, own_out.l1, l1_moved),
                ("l2_weights", l2, own_out.l2, l2_moved),
            ):
                one = with_block_scales(name, layer, expert_idx, moved)
                place = LayerWeights(to.weight[0], to.sf[0])
                lay_out_expert(one, place, is_l1=layer is l1)

    def inverse(self, l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
        from deep_moe.formats.weights import sm90_fp8_inverse

        return sm90_fp8_inverse(l1, l2)

    def tensors(self, shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        from deep_moe.formats.weights import sm90_fp8_tensors

        return sm90_fp8_tensors(shape)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.fp8 import FORMAT
        from deep_moe.trial.reference import SM90

        return dataclasses.replace(SM90, weights=FORMAT.dequantize, sum_block=128)

    def numerics_of(self, token_scales: str) -> Numerics:
        from deep_moe.trial.reference import float_scaled_tokens

        if token_scales != FLOAT_TOKEN_SCALES:
            return self.numerics
        return dataclasses.replace(
            self.numerics, tokens=float_scaled_tokens, multiplies_block_scales=True
        )
