"""FP8 weights as the SM90 kernel reads them: blocks of 256 rows x 128 k as they lie in shared
memory, and four float32 scales with each.

A block is 32768 bytes of E4M3: rows of 128 bytes in the order of the math threads' sums, in the
128-byte swizzle. Slot 128*g + 64*b + 16*w + 8*h + r holds the row that `e4m3_rows_by_slot` gives to
warpgroup g, warp w and its lanes 4*r to 4*r + 3 as (b, h). Along k, byte 32*j + 16*h + 4*q + b of
128 holds value 32*q + 8*j + 4*h + b, the order in which tokens stand. So dispatch and epilogues are
those of MXFP4 weights.

Scales are [g][h]: of Linear1 those of gate (h = 0) and up (h = 1), of Linear2 those of the 128 rows
of each warpgroup. Rows and scales of zero fill the last block where hidden is an odd multiple of
128.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deep_moe.targets.sm90.rows import BLOCK_N, PART_N, RowsOf, e4m3_rows_by_slot, swizzled

from ..layers import KernelLayer, LayerWeights

BLOCK_K = 128
BLOCK_BYTES = BLOCK_N * BLOCK_K
NUM_SCALES = 4  # of a block


def lay_out_expert(layer: LayerWeights, out: KernelLayer, rows_of: RowsOf) -> None:
    """One expert, E4M3 [N, K] with float32 scales [N/128, K/128], into E4M3 [n-blocks, k-blocks,
    32768] and float32 [n-blocks, k-blocks, 4]."""
    num_rows = layer.weight.shape[0]
    if num_rows % BLOCK_N:
        _blocks(out.weight)[-1:, 1] = 0
        out.sf[-1] = 0
    rows = layer.weight.contiguous().view(torch.uint8)
    for own, blocks in _parts(rows, _blocks(out.weight), rows_of):
        blocks.copy_(swizzled(own))
    for own, scales in _scales(layer.sf, out.sf, rows_of):
        scales.copy_(own)


def read_expert(layer: KernelLayer, out: LayerWeights, rows_of: RowsOf) -> None:
    """The inverse."""
    rows = out.weight.view(torch.uint8)
    for own, blocks in _parts(rows, _blocks(layer.weight), rows_of):
        own.copy_(swizzled(blocks.reshape(own.shape)))
    for own, scales in _scales(out.sf, layer.sf, rows_of):
        own.copy_(scales)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """A view [n, g, k-block, row, byte]."""
    blocks = weight.view(torch.uint8).unflatten(-1, (2, PART_N, BLOCK_K))
    return blocks.transpose(1, 2)


def _parts(
    rows: torch.Tensor, blocks: torch.Tensor, rows_of: RowsOf
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the n-blocks with the rows of both warpgroups, and of one with the first's alone: views
    [n, g, k-block, b, w, h, r / 2, r % 2, j, k half, q, byte] of rows [N, K] and of their blocks.
    """
    num_full, num_rest = divmod(rows.shape[0], BLOCK_N)
    for first, last, num_parts in ((0, num_full, 2), (num_full, num_full + num_rest // PART_N, 1)):
        if first == last:
            continue
        of_rows = rows[first * BLOCK_N : (last * BLOCK_N if num_parts == 2 else None)]
        by_slot = e4m3_rows_by_slot(of_rows, num_parts, rows_of).unflatten(4, (2, 2))
        values = by_slot.unflatten(-1, (-1, 4, 4, 2, 4))  # k-block, q, j, k half, byte
        #        n  g  w  r/2 r%2 b  h  k-block q  j  half byte
        #        0  1  2  3   4   5  6  7       8  9  10   11
        own = values.permute(0, 1, 7, 5, 2, 6, 3, 4, 9, 10, 8, 11)
        yield own, blocks[first:last, :num_parts].view(own.shape)


def _scales(
    sf: torch.Tensor, scales: torch.Tensor, rows_of: RowsOf
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of scales [N/128, K/128], and of where each goes, [n, k-block]."""
    by_part = scales.unflatten(-1, (2, 2))  # n, k-block, g, h
    num_values = sf.shape[0] // 2
    for g in range(2):
        for h in range(2):
            own = (
                sf[h * num_values : (h + 1) * num_values]
                if rows_of is RowsOf.GATE_AND_UP
                else sf[g::2]
            )
            yield own, by_part[: own.shape[0], :, g, h]
