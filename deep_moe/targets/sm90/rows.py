"""The order of weight rows in the SM90 kernel's math threads and in shared memory.

A block of weights has 256 rows, 128 for each of two warpgroups g. Lanes 4*r to 4*r + 3 of warp w
have the rows (b, h) of their own: the sums of the b-th of two products, its rows r and r + 8. Of
Linear1, h = 0 is a row of gate, and h = 1 the same row of up. Which value these are differs with
the tokens: beside BF16 tokens, and E4M3 tokens with one scale, a thread has two neighbours; beside
other E4M3 tokens the 16 values of a warp stand together in the order of k that Linear2 has.

Without a gate, Linear1's rows are values each, 128 for each warpgroup. Then the 16 values of a warp
and an h stand together in the order of k that Linear2 has.
"""

from __future__ import annotations

from enum import Enum, auto

import torch


class RowsOf(Enum):
    """What the rows of a layer are: of Linear1 with a gate, those of gate above those of up;
    without, those of up alone; of Linear2 its output."""

    GATE_AND_UP = auto()
    UP = auto()
    OUTPUT = auto()

    @classmethod
    def linear1(cls, has_gate: bool) -> RowsOf:
        return cls.GATE_AND_UP if has_gate else cls.UP

    @property
    def num_matrices(self) -> int:
        """One below the other."""
        return 2 if self is RowsOf.GATE_AND_UP else 1


BLOCK_N = 256  # rows of a block
PART_N = BLOCK_N // 2  # of a warpgroup
ROW_BYTES = 128  # of a k-block in shared memory, the span of the swizzle
_SWIZZLE_ROWS = 8  # after so many, the pattern repeats


def e4m3_rows_by_slot(rows: torch.Tensor, num_parts: int, rows_of: RowsOf) -> torch.Tensor:
    """Beside E4M3 tokens with scales along k: a view [n, g, w, r / 2, (r % 2, b), h, ...] of rows
    [N, ...] of whole n-blocks."""
    if rows_of is RowsOf.OUTPUT:
        return rows.unflatten(0, (-1, num_parts, 4, 4, 4, 2))
    # Values v = 32*q + 4*c + s in each 128: q, s are r, b.
    if rows_of is RowsOf.UP:  # c is (w, h)
        return rows.unflatten(0, (-1, num_parts, 4, 4, 2, 4)).movedim((3, 2, 5, 4), (2, 3, 4, 5))
    # [gate | up], c is (g, w).
    halves = rows.unflatten(0, (2, -1, 4, num_parts, 4, 4))
    return halves.movedim((1, 3, 4, 2, 5, 0), (0, 1, 2, 3, 4, 5))


def e4m3_slot_order(num_rows: int, rows_of: RowsOf) -> torch.Tensor:
    """The row of each of the slots of a layer's n-blocks, in the order of row factors: int64
    [num_rows], a multiple of 256."""
    order = torch.empty((num_rows // BLOCK_N, BLOCK_N), dtype=torch.int64, device="cpu")
    rows = e4m3_rows_by_slot(torch.arange(num_rows, device="cpu"), 2, rows_of)
    by_slot(order).copy_(rows.unflatten(4, (2, 2)))
    return order.flatten()


def by_slot(slots: torch.Tensor) -> torch.Tensor:
    """A view [n, g, w, r / 2, r % 2, b, h] of what n-blocks have for each row, [n, 256]."""
    return slots.unflatten(-1, (2, 2, 4, 2, 4, 2)).permute(0, 1, 3, 5, 6, 2, 4)


def bf16_rows_by_slot(rows: torch.Tensor, num_parts: int, rows_of: RowsOf) -> torch.Tensor:
    """Where k keeps its order: a view [n, g, w, r, b, h, ...] of rows [N, ...] of n-blocks with
    num_parts warpgroups."""
    if rows_of is RowsOf.UP:
        return rows.unflatten(0, (-1, num_parts, 4, 2, 8, 2)).movedim(3, 5)  # from n, g, w, h, r, b
    if rows_of is RowsOf.GATE_AND_UP:
        return rows.unflatten(0, (2, -1, num_parts, 4, 8, 2)).movedim(0, 5)  # from h, n, g, w, r, b
    return rows.unflatten(0, (-1, num_parts, 4, 8, 2, 2))


def bf16_slot_order(num_rows: int, rows_of: RowsOf) -> torch.Tensor:
    """The row of each of the slots of a layer's n-blocks: int64 [num_rows], a multiple of 256."""
    rows = bf16_rows_by_slot(torch.arange(num_rows, device="cpu"), 2, rows_of)
    return rows.permute(0, 1, 4, 2, 5, 3).flatten()


def swizzled(values: torch.Tensor) -> torch.Tensor:
    """Rows of 8 chunks of 16 bytes, the last dimensions: chunk c of row i goes to c ^ (i % 8), and
    back. A copy of the same shape."""
    chunks = values.contiguous().view(-1, _SWIZZLE_ROWS, ROW_BYTES // 16, 16)
    numbers = torch.arange(_SWIZZLE_ROWS, device=values.device)
    places = numbers.unsqueeze(1) ^ numbers
    return chunks[:, numbers.unsqueeze(1), places].view(values.shape)
