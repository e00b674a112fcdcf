"""BF16 weights on SM90."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sm90_weights import Sm90Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.weights import LayerWeights, MegaMoEWeights
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.trial.reference import Numerics


class Sm90Bf16(Sm90Weights):
    format = "bf16"
    policy = "Bf16Weights"
    # Few stages, for a small case never comes round the ring of the default. One loop for all sizes
    # of m-block, and one for each. CTAs by themselves, and in clusters that share weights.
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 5, "cluster_size": 2},
        {"block_m": 168, "num_stages": 3},
        {"block_m": 128, "block_m_step": 32, "num_stages": 2, "cluster_size": 2},
        {"block_m": 64, "block_m_step": 8, "num_stages": 3},
    )

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.formats.sm90_bf16_weights import lay_out_expert

        for layer, to in ((l1, out.l1), (l2, out.l2)):
            for own, place in zip(layer.weight, to.weight, strict=True):
                lay_out_expert(own, place, is_l1=layer is l1)

    def inverse(self, l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
        from deep_moe.formats.weights import sm90_bf16_inverse

        return sm90_bf16_inverse(l1, l2)

    def tensors(self, shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        from deep_moe.formats.weights import sm90_bf16_tensors

        return sm90_bf16_tensors(shape)

    def bias_order(self, num_rows: int, *, is_l1: bool) -> torch.Tensor:
        from deep_moe.formats.sm90_bf16_weights import slot_order

        return slot_order(num_rows, is_l1=is_l1)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.trial.reference import BF16

        return BF16
