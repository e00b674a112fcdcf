"""Weights that keep the order of k, as the SM90 kernel reads them: blocks of 256 rows x 128 bytes
of k, 64 values of BF16 or 128 of E4M3, as they lie in shared memory.

A block is 32768 bytes: rows in the order of the math threads' sums, in the 128-byte swizzle. Slot
128*g + 64*b + 16*w + 8*h + r holds what warpgroup g, warp w and its lanes 4*r to 4*r + 3 have as
(b, h): of Linear1 gate (h = 0) or up (h = 1) of value 64*g + 16*w + 2*r + b of the block's 128, so
that a thread has two neighbours, or without a gate value 128*g + 32*w + 16*h + 2*r + b of 256; of
Linear2 row 128*g + 32*w + 4*r + 2*b + h. Rows of zeros fill the last block where there is an odd
multiple of 128.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .rows import (
    BLOCK_N,
    PART_N,
    ROW_BYTES,
    RowsOf,
    bf16_rows_by_slot,
    bf16_slot_order,
    swizzled,
)

BLOCK_BYTES = BLOCK_N * ROW_BYTES


def lay_out_expert(weight: torch.Tensor, out: torch.Tensor, rows_of: RowsOf) -> None:
    """One expert [N, K] into [n-blocks, k-blocks, values of a block]."""
    blocks = _blocks(out)
    if weight.shape[0] % BLOCK_N:
        blocks[-1:, 1] = 0
    rows = weight.contiguous().view(torch.uint8)
    for own, place in _parts(rows, blocks, rows_of):
        place.copy_(swizzled(own))


def read_expert(layer: torch.Tensor, out: torch.Tensor, rows_of: RowsOf) -> None:
    """The inverse."""
    rows = out.view(torch.uint8)
    for own, place in _parts(rows, _blocks(layer), rows_of):
        own.copy_(swizzled(place))


def lay_out_factors(factors: torch.Tensor, out: torch.Tensor, rows_of: RowsOf) -> None:
    """One expert's factors of rows, float32 [N], into [n-blocks, 256], zeros where there is no
    row."""
    whole = factors.new_zeros(out.numel())
    whole[: len(factors)] = factors
    out.copy_(whole[_slot_order(out, rows_of)].view(out.shape))


def read_factors(layer: torch.Tensor, out: torch.Tensor, rows_of: RowsOf) -> None:
    """The inverse."""
    whole = torch.empty_like(layer).flatten()
    whole[_slot_order(layer, rows_of)] = layer.flatten()
    out.copy_(whole[: len(out)])


def _slot_order(factors: torch.Tensor, rows_of: RowsOf) -> torch.Tensor:
    return bf16_slot_order(factors.numel(), rows_of).to(factors.device)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """A view [n, g, k-block, row, byte]."""
    return weight.view(torch.uint8).unflatten(-1, (2, PART_N, ROW_BYTES)).transpose(1, 2)


def _parts(
    rows: torch.Tensor, blocks: torch.Tensor, rows_of: RowsOf
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the n-blocks with the rows of both warpgroups, and of one with the first's alone: views
    [n, g, k-block, b, w, h, r, byte] of rows [N, bytes] and of their blocks."""
    num_full, num_rest = divmod(rows.shape[0], BLOCK_N)
    for first, last, num_parts in ((0, num_full, 2), (num_full, num_full + num_rest // PART_N, 1)):
        if first == last:
            continue
        of_rows = rows[first * BLOCK_N : (last * BLOCK_N if num_parts == 2 else None)]
        in_slots = bf16_rows_by_slot(of_rows, num_parts, rows_of).unflatten(-1, (-1, ROW_BYTES))
        #        n  g  w  r  b  h  k-block byte
        #        0  1  2  3  4  5  6       7
        own = in_slots.permute(0, 1, 6, 4, 2, 5, 3, 7)
        yield own, blocks[first:last, :num_parts].view(own.shape)
