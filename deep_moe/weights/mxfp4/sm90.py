"""MXFP4 weights on SM90, which the kernel decodes in registers: to E5M2 beside E4M3 tokens, to BF16
beside BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.heuristics.sm90 import SPARED_TILES, TILES, WeightKind
from deep_moe.targets.sm90.decoded import Sm90DecodedWeights, bf16_decoded_kind, decoded_costs
from deep_moe.targets.sm90.weights import Sm90Weights

if TYPE_CHECKING:
    from types import ModuleType

    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.targets.sm90.decoded_blocks import DecodedBlocks

    from ..layers import ExpertWeights, KernelLayer, LayerWeights, MegaMoEWeights, TensorForms


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

    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        from deep_moe.targets.sm90.rows import RowsOf

        from ..layers import ExpertWeights, LayerWeights

        shape = self.checked_shape(l1, l2, has_gate=has_gate)
        unshuffle, rows_of_l1 = self.blocks.unshuffle_layer, RowsOf.linear1(has_gate)
        return ExpertWeights(
            LayerWeights(*unshuffle(*l1, num_rows=shape.num_l1_rows, rows_of=rows_of_l1)),
            LayerWeights(*unshuffle(*l2, num_rows=shape.hidden, rows_of=RowsOf.OUTPUT)),
        )

    def tensors(self, shape: MoEShape) -> TensorForms:
        """Blocks, and a factor for each row."""
        import torch

        l1, l2 = self.block_dims(shape)
        block_n, block_bytes = self.blocks.BLOCK_N, self.blocks.BLOCK_BYTES
        return {
            "l1_weights[0]": (torch.int8, (*l1, block_bytes)),
            "l1_weights[1]": (torch.float32, (*l1[:2], block_n)),
            "l2_weights[0]": (torch.int8, (*l2, block_bytes)),
            "l2_weights[1]": (torch.float32, (*l2[:2], block_n)),
        }

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import sm90_numerics

        from .format import FORMAT

        return sm90_numerics(FORMAT.dequantize)


class Sm90Mxfp4Bf16(Sm90DecodedWeights):
    weights = "mxfp4"
    policy = "Mxfp4Bf16Weights"
    kind = bf16_decoded_kind(8704)

    @property
    def blocks(self) -> DecodedBlocks:
        from .sm90_bf16_blocks import BLOCKS

        return BLOCKS

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize)


KERNELS = (Sm90Mxfp4(), Sm90Mxfp4Bf16())
