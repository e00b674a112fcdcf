"""MXFP4 weights on SM90, which the kernel decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sm90_weights import Sm90Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.weights import LayerWeights, MegaMoEWeights
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.trial.reference import Numerics


class Sm90Mxfp4(Sm90Weights):
    format = "mxfp4"
    policy = "Mxfp4Weights"
    # Few stages, for a small case never comes round the ring of the default. The three kinds of
    # main loop: products in pairs, one by one, and a loop for each size of m-block; the last in
    # clusters that share weights.
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 5},
        {"block_m": 168, "num_stages": 3},
        {"block_m": 128, "block_m_step": 32, "num_stages": 2},
        {"block_m": 64, "block_m_step": 8, "num_stages": 3, "cluster_size": 2},
    )

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.formats.weights import sm90_transform

        sm90_transform(l1, l2, out)

    def inverse(self, l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
        from deep_moe.formats.weights import sm90_inverse

        return sm90_inverse(l1, l2)

    def tensors(self, shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        from deep_moe.formats.weights import sm90_tensors

        return sm90_tensors(shape)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.trial.reference import SM90

        return SM90
