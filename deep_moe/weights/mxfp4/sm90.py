"""MXFP4 weights on SM90, which the kernel decodes in registers: to E5M2 beside E4M3 tokens, to BF16
beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.heuristics.sm90_tiles import SPARED_TILES, TILES, WeightKind
from deep_moe.targets.sm90.decoded import Sm90DecodedWeights, bf16_decoded_kind, decoded_costs
from deep_moe.targets.sm90.weights import Sm90Weights

if TYPE_CHECKING:
    from types import ModuleType

    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.targets.sm90.rows import RowsOf

    from ..layers import KernelLayer, LayerWeights, MegaMoEWeights, TensorForms


class Sm90Mxfp4(Sm90Weights):
    weights = "mxfp4"
    token_format = "mxfp8"
    policy = "Mxfp4Weights"
    kind = WeightKind(17408, True, False, False, TILES, decoded_costs, spared_tiles=SPARED_TILES)
    # Few stages, for a small case never comes round the ring of the default. The three kinds of
    # main loop: products in pairs, one by one, and a loop for each size of m-block; the last in
    # clusters that share weights.
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 5},
        {"block_m": 168, "num_stages": 3},
        {"block_m": 128, "block_m_step": 32, "num_stages": 2},
        {"block_m": 64, "block_m_step": 8, "num_stages": 3, "cluster_size": 2},
    )

    @property
    def blocks(self) -> ModuleType:
        """The layout."""
        from . import sm90_e5m2_blocks

        return sm90_e5m2_blocks

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm90.rows import RowsOf

        rows_of_l1 = RowsOf.linear1(out.has_gate)
        self.blocks.shuffle_layer(*l1, out.l1, name="l1_weights", rows_of=rows_of_l1)
        self.blocks.shuffle_layer(*l2, out.l2, name="l2_weights", rows_of=RowsOf.OUTPUT)

    def read_layer(
        self, layer: KernelLayer, size: tuple[int, int, int], rows_of: RowsOf
    ) -> LayerWeights:
        from ..layers import LayerWeights

        read = self.blocks.unshuffle_layer
        return LayerWeights(*read(*layer, num_rows=size[1], rows_of=rows_of))

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        return self.blocks_and_factors(shape, torch.int8, self.blocks.BLOCK_BYTES)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import sm90_numerics

        from .format import FORMAT

        return sm90_numerics(FORMAT.dequantize)


class Sm90Mxfp4Bf16(Sm90DecodedWeights):
    weights = "mxfp4"
    policy = "Mxfp4Bf16Weights"
    kind = bf16_decoded_kind(8704)


KERNELS = (Sm90Mxfp4(), Sm90Mxfp4Bf16())
