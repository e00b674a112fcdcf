"""Blocks of values that share a scale, in matrices of any size.

A layer's tensor holds matrices one below the other: gate and up for Linear1, one for Linear2. Each
has blocks of its own, and the last ones of a matrix cover fewer rows and columns where its size is
no multiple of theirs, as in checkpoints.
"""

from __future__ import annotations

import torch

from .sizes import K_BLOCK


def num_blocks(
    num_rows: int, num_columns: int, scale_block: tuple[int, int], num_matrices: int = 1
) -> tuple[int, int]:
    """Rows and columns of the scales of values [num_rows, num_columns].

    >>> num_blocks(2 * 192, 320, (128, 128), num_matrices=2), num_blocks(192, 320, (1, 32))
    ((4, 3), (192, 10))
    >>> from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW
    >>> num_blocks(2 * 192, 320, WHOLE_ROW, 2), num_blocks(2 * 192, 320, WHOLE_MATRIX, 2)
    ((384, 1), (2, 1))
    """
    rows, columns = scale_block
    return num_matrices * -(-num_rows // num_matrices // rows), -(-num_columns // columns)


def over_values(
    scales: torch.Tensor,
    scale_block: tuple[int, int],
    num_rows: int,
    num_columns: int,
    num_matrices: int = 1,
) -> torch.Tensor:
    """Scales [..., blocks, blocks], each for all of its values: [..., num_rows, num_columns]."""
    rows, columns = scale_block
    rows_of_one = num_rows // num_matrices
    of_rows = scales.unflatten(-2, (num_matrices, -1)).repeat_interleave(min(rows, rows_of_one), -2)
    of_rows = of_rows[..., :rows_of_one, :].flatten(-3, -2)
    return of_rows.repeat_interleave(min(columns, num_columns), -1)[..., :num_columns]


def padded_values(weight: torch.Tensor, num_matrices: int, per_element: int = 1) -> torch.Tensor:
    """Values [E, N, K], so many in an element, with zeros up to multiples of 128 of each matrix's
    sizes. A copy."""
    matrices = _bytes(weight).unflatten(1, (num_matrices, -1))
    bytes_per_block = K_BLOCK // per_element * weight.element_size()
    missing = (0, -matrices.shape[3] % bytes_per_block, 0, -matrices.shape[2] % K_BLOCK)
    return torch.nn.functional.pad(matrices, missing).flatten(1, 2).view(weight.dtype)


def cut_values(
    weight: torch.Tensor, num_matrices: int, num_rows: int, num_elements: int
) -> torch.Tensor:
    """The inverse, of matrices of so many rows and elements in a row. A copy."""
    matrices = weight.unflatten(1, (num_matrices, -1))[:, :, :num_rows, :num_elements]
    return matrices.flatten(1, 2).contiguous()


def repeated_to(
    scales: torch.Tensor, num_matrices: int, num_rows: int, num_columns: int
) -> torch.Tensor:
    """Scales [E, rows, columns] of matrices with more of both, which get those of the last row and
    column. A copy."""
    matrices = scales.unflatten(1, (num_matrices, -1))
    rows, columns = (
        torch.arange(number, device=scales.device).clamp(max=own - 1)
        for number, own in zip((num_rows, num_columns), matrices.shape[2:], strict=True)
    )
    return matrices[:, :, rows][..., columns].flatten(1, 2)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
