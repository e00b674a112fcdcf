"""BF16 weights as the SM90 kernel reads them: blocks of 256 rows x 64 k as they lie in shared
memory.

A block is 32768 bytes: rows of 64 values in the order of the math threads' sums, in the 128-byte
swizzle. Slot 128*g + 64*b + 16*w + 8*h + r holds what warpgroup g, warp w and its lanes 4*r to
4*r + 3 have as (b, h): of Linear1 gate (h = 0) or up (h = 1) of value 64*g + 16*w + 2*r + b of the
block's 128, so that a thread has two neighbours; of Linear2 row 128*g + 32*w + 4*r + 2*b + h. Along
k values stand as they are. Rows of zeros fill the last block where hidden is an odd multiple of
128.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deep_moe.targets.sm90.rows import BLOCK_N, PART_N, bf16_rows_by_slot, swizzled

BLOCK_K = 64
BLOCK_VALUES = BLOCK_N * BLOCK_K

_ROW_BYTES = 2 * BLOCK_K


def lay_out_expert(weight: torch.Tensor, out: torch.Tensor, *, is_l1: bool) -> None:
    """One expert, bfloat16 [N, K], into bfloat16 [n-blocks, k-blocks, 16384]."""
    blocks = _blocks(out)
    if weight.shape[0] % BLOCK_N:
        blocks[-1:, 1] = 0
    rows = weight.contiguous().view(torch.uint8)
    for own, place in _parts(rows, blocks, is_l1=is_l1):
        place.copy_(swizzled(own))


def read_expert(layer: torch.Tensor, out: torch.Tensor, *, is_l1: bool) -> None:
    """The inverse."""
    rows = out.view(torch.uint8)
    for own, place in _parts(rows, _blocks(layer), is_l1=is_l1):
        own.copy_(swizzled(place))


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """A view [n, g, k-block, row, byte]."""
    return weight.view(torch.uint8).unflatten(-1, (2, PART_N, _ROW_BYTES)).transpose(1, 2)


def _parts(
    rows: torch.Tensor, blocks: torch.Tensor, *, is_l1: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the n-blocks with the rows of both warpgroups, and of one with the first's alone: views
    [n, g, k-block, b, w, h, r, byte] of rows [N, bytes] and of their blocks."""
    num_full, num_rest = divmod(rows.shape[0], BLOCK_N)
    for first, last, num_parts in ((0, num_full, 2), (num_full, num_full + num_rest // PART_N, 1)):
        if first == last:
            continue
        of_rows = rows[first * BLOCK_N : (last * BLOCK_N if num_parts == 2 else None)]
        in_slots = bf16_rows_by_slot(of_rows, num_parts, is_l1).unflatten(-1, (-1, _ROW_BYTES))
        #        n  g  w  r  b  h  k-block byte
        #        0  1  2  3  4  5  6       7
        own = in_slots.permute(0, 1, 6, 4, 2, 5, 3, 7)
        yield own, blocks[first:last, :num_parts].view(own.shape)
