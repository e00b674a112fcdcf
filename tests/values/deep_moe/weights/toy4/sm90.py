"""The format on SM90, beside BF16 tokens: blocks of 256 rows x 64 k, which the math warps decode,
and a factor for each row.

A block is two parts of 4096 bytes, one for each math warpgroup: of each half of its rows 16 bytes
for each thread, a word for each of 4 products. A word's bytes are the registers of the product's
operand, [k + 8][row + 8], each two neighbours along k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deep_moe.heuristics.sm90 import BLOCK_N
from deep_moe.heuristics.sm90_tiles import SPARED_TILES, TILES, WeightKind
from deep_moe.targets.sm90.weights import Sm90Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.targets.sm90.rows import RowsOf
    from deep_moe.weights.layers import (
        KernelLayer,
        LayerWeights,
        MegaMoEWeights,
        TensorForms,
    )

BLOCK_BYTES = 8192


def costs(rows: float) -> tuple[float, float]:
    return 1 + rows / 100, 0.8 + rows / 100


class Sm90Toy4(Sm90Weights):
    weights = "toy4"
    token_format = "bf16"
    policy = "Toy4Weights"
    scale_block = (1, 1 << 12)
    kind = WeightKind(BLOCK_BYTES, True, False, False, TILES, costs, spared_tiles=SPARED_TILES)
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 5},
        {"block_m": 80, "num_stages": 3, "cluster_size": 2},
        {"block_m": 128, "block_m_step": 32, "num_stages": 2},
        {"block_m": 64, "block_m_step": 8, "num_stages": 3},
    )

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm90.rows import RowsOf

        rows_of_l1 = RowsOf.linear1(out.has_gate)
        for own, laid_out, rows_of in ((l1, out.l1, rows_of_l1), (l2, out.l2, RowsOf.OUTPUT)):
            for tensor in laid_out:
                tensor.zero_()
            for rows, slots in _views(own, laid_out, rows_of):
                slots.copy_(rows)

    def read_layer(
        self, layer: KernelLayer, size: tuple[int, int, int], rows_of: RowsOf
    ) -> LayerWeights:
        import torch

        from deep_moe.weights.layers import LayerWeights

        *rows_of_experts, num_values = size
        made = LayerWeights(
            layer.weight.new_empty((*rows_of_experts, num_values // 4), dtype=torch.int16),
            layer.sf.new_empty(rows_of_experts),
        )
        for rows, slots in _views(made, layer, rows_of):
            rows.copy_(slots)
        return made

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        return self.blocks_and_factors(shape, torch.uint8, BLOCK_BYTES)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize)


KERNELS = (Sm90Toy4(),)


def _views(
    own: LayerWeights, laid_out: KernelLayer, rows_of: RowsOf
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the same shape of what is the same, in the order of rows, and as it is laid out: of
    the n-blocks with the rows of both warpgroups, and of one with the first's alone."""
    import torch

    from deep_moe.targets.sm90.rows import bf16_rows_by_slot

    for weight, sf, blocks, factors in zip(*own, *laid_out, strict=True):
        num_full, num_rest = divmod(weight.shape[0], BLOCK_N)
        for first, last, num_parts in ((0, num_full, 2), (num_full, num_full + bool(num_rest), 1)):
            if first == last:
                continue
            rows = slice(first * BLOCK_N, last * BLOCK_N)
            pairs = bf16_rows_by_slot(weight[rows].view(torch.uint8), num_parts, rows_of)
            #        n, g, w, r, b, h, then bytes of a row: k-block, product, k + 8, q
            pairs = pairs.unflatten(-1, (-1, 4, 2, 4)).permute(0, 6, 1, 4, 2, 3, 9, 7, 8, 5)
            of_blocks = blocks[first:last].unflatten(-1, (2, 2, 4, 8, 4, 4, 2, 2))
            yield pairs, of_blocks[:, :, :num_parts]
            of_rows = bf16_rows_by_slot(sf[rows], num_parts, rows_of).permute(0, 1, 4, 2, 5, 3)
            yield of_rows, factors[first:last].unflatten(-1, (2, 2, 4, 2, 8))[:, :num_parts]
