"""Weights that the SM90 kernel decodes to BF16 beside BF16 tokens, of any format: their tensors,
and what tiles cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from deep_moe.heuristics.sm90_tiles import (
    FURTHER_TILE_COST,
    SPARED_TILES,
    TILE_ROWS_PER_UNIT,
    TILES,
    WeightKind,
)

from .weights import Sm90Weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.weights.layers import KernelLayer, LayerWeights, MegaMoEWeights, TensorForms

    from .decoded_blocks import DecodedBlocks
    from .rows import RowsOf


def decoded_costs(rows: float) -> tuple[float, float]:
    """Of tiles whose weights are decoded.

    >>> decoded_costs(150)
    (2.0, 1.2)
    """
    cost = 1 + rows / TILE_ROWS_PER_UNIT
    return cost, FURTHER_TILE_COST * cost


def bf16_decoded_costs(rows: float) -> tuple[float, float]:
    """Of tiles whose weights are decoded for tokens in BF16, of any format. Not fitted: the weights
    are taken to cost as with `decoded_costs`, which are about as many bytes, and the products twice
    as much. An H100's times with what this chooses are in benchmarks/LOG.md.

    >>> bf16_decoded_costs(150)
    (3.0, 2.2)
    """
    first, further = decoded_costs(rows)
    return first + rows / TILE_ROWS_PER_UNIT, further + rows / TILE_ROWS_PER_UNIT


# With 168 rows ptxas has too few registers to overlap the products with anything else, though not
# with 176.
BF16_DECODED_TILES = tuple(tile for tile in TILES if tile != (168, 168))


def bf16_decoded_kind(
    block_bytes: int, tiles: tuple[tuple[int, int], ...] = BF16_DECODED_TILES
) -> WeightKind:
    """Of weights that are decoded to BF16."""
    return WeightKind(
        block_bytes,
        True,
        False,
        False,
        tiles,
        bf16_decoded_costs,
        spared_tiles=SPARED_TILES,
    )


class Sm90DecodedWeights(Sm90Weights):
    """kind: by `bf16_decoded_kind`, with the bytes of `blocks`."""

    token_format = "bf16"
    # Few stages, for a small case never comes round the ring of the default. The three kinds of
    # main loop: products in pairs, one by one, and a loop for each size of m-block. CTAs by
    # themselves, and in clusters that share weights.
    fuzz_tiles: ClassVar[tuple[Mapping[str, int], ...]] = (
        {"block_m": 16, "num_stages": 5, "cluster_size": 2},
        {"block_m": 176, "num_stages": 3},
        {"block_m": 128, "block_m_step": 32, "num_stages": 2},
        {"block_m": 64, "block_m_step": 8, "num_stages": 3},
    )

    @property
    def blocks(self) -> DecodedBlocks:
        """The layout, which sm90_bf16_blocks.py in the format's folder has."""
        from deep_moe.weights import folder_module

        blocks: DecodedBlocks = folder_module(self.weights, "sm90_bf16_blocks").BLOCKS
        return blocks

    @property
    def numerics(self) -> Numerics:
        """Of weights whose decoded values are exact."""
        from deep_moe.formats.numerics import bf16_numerics
        from deep_moe.weights import weight_format

        return bf16_numerics(weight_format(self.weights).dequantize)

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from .rows import RowsOf

        rows_of_l1 = RowsOf.linear1(out.has_gate)
        self.blocks.lay_out(l1, out.l1, name="l1_weights", rows_of=rows_of_l1)
        self.blocks.lay_out(l2, out.l2, name="l2_weights", rows_of=RowsOf.OUTPUT)

    def read_layer(
        self, layer: KernelLayer, size: tuple[int, int, int], rows_of: RowsOf
    ) -> LayerWeights:
        from deep_moe.weights.layers import LayerWeights

        return LayerWeights(*self.blocks.read(layer, num_rows=size[1], rows_of=rows_of))

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        return self.blocks_and_factors(shape, torch.int8, self.blocks.block_bytes)
