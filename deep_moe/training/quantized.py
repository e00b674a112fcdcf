"""Rows and weights as E4M3 with float32 scales: a scale for 128 values of a row, and for 128 x 128
of a matrix.

A quantized row is one row of BF16 that stands for bytes: its values, its scales, and what is left
of 16 bytes. So whatever moves rows moves these as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.heuristics.products import K_GROUP
from deep_moe.heuristics.segments import align_up

_BF16_BYTES, _SCALE_BYTES, _ROW_ALIGNMENT = 2, 4, 16


@dataclass(frozen=True)
class QuantizedWeights:
    """values: float8_e4m3fn [experts, N, K]. scales: float32 [experts, ceil(N/128), K/128]."""

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class QuantizedColumns:
    """Rows in blocks of 128 of an expert, from its first one, transposed: operands of products
    whose sums go over rows. What is left of an expert's last block is zero. An expert without rows
    has a block of zeros. There are as many blocks as there can be; those behind the last expert's
    hold anything. values: float8_e4m3fn [blocks, K, 128]. scales: float32 [blocks, K / 128]."""

    values: torch.Tensor
    scales: torch.Tensor


def max_row_blocks(num_rows: int, num_experts: int) -> int:
    """Blocks of 128 rows, however the rows fall on the experts.

    >>> max_row_blocks(300, num_experts=2)  # 172 and 128, or 1 and 299: 3 and 4
    4
    """
    return num_rows // K_GROUP + num_experts


def quantized_width(num_values: int) -> int:
    """BF16 values that a quantized row takes the place of.

    >>> quantized_width(256)  # 256 bytes of values, 8 of scales, 8 without meaning
    136
    """
    scale_bytes = align_up(num_values // K_GROUP * _SCALE_BYTES, _ROW_ALIGNMENT)
    return (num_values + scale_bytes) // _BF16_BYTES


def parts_of_rows(rows: torch.Tensor, num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of quantized rows: float8_e4m3fn [R, num_values] and float32 [R, num_values / 128]."""
    rows_bytes = rows.view(torch.uint8)
    end = num_values + num_values // K_GROUP * _SCALE_BYTES
    values = rows_bytes[:, :num_values].view(torch.float8_e4m3fn)
    return values, rows_bytes[:, num_values:end].view(torch.float32)


def num_other_bytes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In how many bytes two contiguous tensors of a shape and type differ, on their device."""
    return (a.view(torch.uint8) != b.view(torch.uint8)).sum()


def quantized_rows(values: torch.Tensor) -> torch.Tensor:
    """BF16 [R, K], quantized in PyTorch."""
    rows = values.new_zeros(values.shape[0], quantized_width(values.shape[1]))
    for part, quantized in zip(
        parts_of_rows(rows, values.shape[1]), quantize_e4m3_float(values), strict=True
    ):
        part.copy_(quantized)
    return rows


def quantized_columns(values: torch.Tensor, offs: torch.Tensor) -> QuantizedColumns:
    """BF16 [R, K] of experts whose rows end at offs, quantized in PyTorch."""
    num_values = values.shape[1]
    num_blocks = max_row_blocks(values.shape[0], len(offs))
    begin, block = 0, 0
    blocks = values.new_zeros(num_blocks, K_GROUP, num_values)
    for end in offs.tolist():
        rows = values[begin:end].split(K_GROUP)
        for place, part in enumerate(rows):
            blocks[block + place, : len(part)] = part
        begin, block = end, block + max(len(rows), 1)
    quantized = quantized_weights(blocks)
    return QuantizedColumns(quantized.values, quantized.scales.squeeze(2))


def transposed_weights(weights: QuantizedWeights) -> QuantizedWeights:
    """The same values in the other order; N is a multiple of 128, too."""
    codes = weights.values.view(torch.uint8).transpose(1, 2).contiguous()
    scales = weights.scales.transpose(1, 2).contiguous()
    return QuantizedWeights(codes.view(torch.float8_e4m3fn), scales)


def quantized_weights(weights: torch.Tensor) -> QuantizedWeights:
    """BF16 [experts, K, N], quantized in PyTorch, one expert at a time: each is widened."""
    num_experts, num_values, num_columns = weights.shape
    num_k_blocks, num_n_blocks = num_values // K_GROUP, -(-num_columns // K_GROUP)
    values = weights.new_empty(num_experts, num_columns, num_values, dtype=torch.float8_e4m3fn)
    scales = weights.new_empty(num_experts, num_n_blocks, num_k_blocks, dtype=torch.float32)
    padding = (0, 0, 0, num_n_blocks * K_GROUP - num_columns)
    for expert, matrix in enumerate(weights):
        padded = torch.nn.functional.pad(matrix.t(), padding)
        blocks = padded.unflatten(1, (-1, K_GROUP)).unflatten(0, (-1, K_GROUP)).transpose(1, 2)
        flat, scale = quantize_e4m3_float(blocks.flatten(2), group_size=K_GROUP * K_GROUP)
        whole = flat.view(blocks.shape).transpose(1, 2).reshape(padded.shape)
        values[expert] = whole[:num_columns]
        scales[expert] = scale.squeeze(2)
    return QuantizedWeights(values, scales)
