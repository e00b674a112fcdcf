"""What PyTorch multiplies: groups of rows, one group per expert, whose ends lie on the device.

BF16 on a GPU goes to PyTorch's grouped GEMM, which reads the ends on the device. Elsewhere the
groups are multiplied one after the other. Reading the ends needs no wait on a CPU; float64 on a GPU
waits, because it only checks gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """rows [R, K] times each one's expert of weights [experts, K, N]: [R, N]. Rows behind the last
    end are not read, and hold anything in the result."""
    if rows.shape[0] == 0:
        return rows.new_empty(0, weights.shape[2])
    if _has_grouped_gemm(rows):
        return _grouped_mm(rows, weights, offs)
    product = rows.new_zeros(rows.shape[0], weights.shape[2])
    for expert, group in enumerate(_groups(offs)):
        torch.mm(rows[group], weights[expert], out=product[group])
    return product


def grouped_weight_gradient(
    rows: torch.Tensor, d_rows: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """rows [R, K] transposed times d_rows [R, N], for each expert over its rows: [experts, K, N];
    zero for an expert without rows."""
    if rows.shape[0] == 0:
        return rows.new_zeros(offs.shape[0], rows.shape[1], d_rows.shape[1])
    if _has_grouped_gemm(rows):
        return _grouped_mm(rows.t(), d_rows, offs)
    gradient = rows.new_zeros(offs.shape[0], rows.shape[1], d_rows.shape[1])
    for expert, group in enumerate(_groups(offs)):
        torch.mm(rows[group].t(), d_rows[group], out=gradient[expert])
    return gradient


def expert_sums(
    rows: torch.Tensor, offs: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of weight * row over each expert's rows [R, N]: [experts, N], in float32 or wider.

    weights: [R], 1 if None. It is a product with a column per term of the weight: BF16 holds a
    float32 in three, and the sums are the tensor cores'.
    """
    if rows.dtype != torch.bfloat16:
        column = rows.new_ones(rows.shape[0]) if weights is None else weights.to(rows.dtype)
        return grouped_weight_gradient(column.unsqueeze(1), rows, offs)[:, 0]
    num_columns = 8  # the fewest that the grouped GEMM takes
    columns = rows.new_zeros(rows.shape[0], num_columns)
    if weights is None:
        columns[:, 0] = 1
        num_terms = 1
    else:
        rest, num_terms = weights.float(), 3
        for term in range(num_terms):
            columns[:, term] = rest.to(torch.bfloat16)
            rest = rest - columns[:, term].float()
    products = grouped_weight_gradient(columns, rows, offs)
    return products[:, :num_terms].float().sum(1)


def _has_grouped_gemm(rows: torch.Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _groups(offs: torch.Tensor) -> Iterator[slice]:
    begin = 0
    for end in offs.tolist():
        yield slice(begin, end)
        begin = end


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    public = getattr(torch.nn.functional, "grouped_mm", None)  # from PyTorch 2.10 on
    product: torch.Tensor = (public or torch._grouped_mm)(a, b, offs=offs)
    return product
