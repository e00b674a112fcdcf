"""MXFP4 weights on SM90 for tokens in BF16, to which the kernel decodes them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .sm90_weights import Sm90Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.weights import LayerWeights, MegaMoEWeights
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.trial.reference import Numerics


class Sm90Mxfp4Bf16(Sm90Weights):
    format = "mxfp4_bf16"
    policy = "Mxfp4Bf16Weights"
    # As of mxfp4: products in pairs, one by one, and a loop for each size of m-block; CTAs by
    # themselves, and in clusters that share weights.
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 5, "cluster_size": 2},
        {"block_m": 176, "num_stages": 3},
        {"block_m": 128, "block_m_step": 32, "num_stages": 2},
        {"block_m": 64, "block_m_step": 8, "num_stages": 3},
    )

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.formats.sm90_mxfp4_bf16_weights import shuffle_layer

        shuffle_layer(*l1, out.l1, name="l1_weights", is_l1=True)
        shuffle_layer(*l2, out.l2, name="l2_weights", is_l1=False)

    def inverse(self, l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
        from deep_moe.formats.weights import sm90_mxfp4_bf16_inverse

        return sm90_mxfp4_bf16_inverse(l1, l2)

    def tensors(self, shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        from deep_moe.formats.weights import sm90_mxfp4_bf16_tensors

        return sm90_mxfp4_bf16_tensors(shape)

    def bias_order(self, num_rows: int, *, is_l1: bool) -> torch.Tensor:
        from deep_moe.formats.sm90_bf16_weights import slot_order

        return slot_order(num_rows, is_l1=is_l1)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.mxfp4_bf16 import FORMAT
        from deep_moe.trial.reference import BF16

        return dataclasses.replace(BF16, weights=FORMAT.dequantize)
