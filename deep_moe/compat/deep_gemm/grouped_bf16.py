"""DeepGEMM's grouped products of BF16, and of E4M3 with E2M1, by PyTorch's grouped product of BF16.

E4M3 and E2M1 times their scales, powers of two, are BF16 numbers, so that nothing is rounded but
the sums. What is quantized becomes BF16 in each call: for as many rows as a layer has, the fused
call takes the quantized weights as they are.
"""

from __future__ import annotations

import torch

from deep_moe.described import described_as
from deep_moe.formats.block_scaled import dequantize_e4m3_ue8m0
from deep_moe.fused.checks import check_contiguous, require_type
from deep_moe.tensor_memory import check_dense, check_memory
from deep_moe.training.products import grouped_product
from deep_moe.weights.mxfp4.quantizing import dequantize_mxfp4

from .grouped import (
    Pair,
    checked_pair,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    spans_of_layout,
)
from .operands import packed_scales, packed_weights

_GROUP = 32  # values that share a scale
_RECIPE = (1, 1, _GROUP)
_SIDE_RECIPE = (1, _GROUP)
_ALIGNMENT = 8  # of N and K: 16 bytes of BF16


@described_as(m_grouped_fp8_gemm_nt_contiguous)
@torch.no_grad()
def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """d[row] = a[row] @ b[group of the row].T, for rows by group one behind the other.

    Other arguments and errors are as of `m_grouped_fp8_gemm_nt_contiguous`.

    Args:
        a: bfloat16 [M, K]; K is a multiple of 8.
        b: bfloat16 [groups, N, K]; N is a multiple of 8.
    """
    _check_matrix("a", a, 2, "[M, K]")
    _check_matrix("b", b, 3, "[groups, N, K]")
    begins, counts = spans_of_layout(grouped_layout, a.shape[0], b.shape[0], use_psum_layout)
    _multiply(a, b, d, begins, counts)


@described_as(m_grouped_fp8_gemm_nt_masked, m_grouped_bf16_gemm_nt_contiguous)
@torch.no_grad()
def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> None:
    """d[group, row] = a[group, row] @ b[group].T, for the first masked_m[group] rows of each.

    Other arguments and errors are as of `m_grouped_fp8_gemm_nt_masked` and
    `m_grouped_bf16_gemm_nt_contiguous`.

    Args:
        a: bfloat16 [groups, M, K]; K is a multiple of 8.
        b: bfloat16 [groups, N, K]; N is a multiple of 8.
    """
    _check_matrix("a", a, 3, "[groups, M, K]")
    _check_matrix("b", b, 3, "[groups, N, K]")
    _multiply_masked(a, b, d, masked_m)


@described_as(m_grouped_bf16_gemm_nt_contiguous)
@torch.no_grad()
def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """d[row] = a[row] @ b[group of the row].T, for rows by group one behind the other.

    Other arguments and errors are as of `m_grouped_bf16_gemm_nt_contiguous`.

    Args:
        a: float8_e4m3fn [M, K] and scales for 32 values: int32 [M, K/128] with four UE8M0 bytes
            each, float8_e8m0fnu or uint8 [M, K/32], or float32 powers of two. K is a multiple of
            32.
        b: int8, uint8 or float4_e2m1fn_x2 [groups, N, K/2], two E2M1 values in a byte, and scales
            as a's. N is a multiple of 8.
        recipe: None or (1, 1, 32).
        recipe_a: None or (1, 32).
        recipe_b: None or (1, 32).
        disable_ue8m0_cast: only False.
    """
    _check_recipes(recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    rows, matrices = _rows_of(a), _matrices_of(b)
    _check_matrix("a[0]", rows, 2, "[M, K]")
    begins, counts = spans_of_layout(
        grouped_layout, rows.shape[0], matrices.shape[0], use_psum_layout
    )
    _multiply(rows, matrices, d, begins, counts)


@described_as(m_grouped_bf16_gemm_nt_masked, m_grouped_fp8_fp4_gemm_nt_contiguous)
@torch.no_grad()
def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d[group, row] = a[group, row] @ b[group].T, for the first masked_m[group] rows of each.

    Other arguments and errors are as of `m_grouped_bf16_gemm_nt_masked` and
    `m_grouped_fp8_fp4_gemm_nt_contiguous`.

    Args:
        a: float8_e4m3fn [groups, M, K] and scales, as of `m_grouped_fp8_fp4_gemm_nt_contiguous`.
    """
    _check_recipes(recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    rows, matrices = _rows_of(a), _matrices_of(b)
    _check_matrix("a[0]", rows, 3, "[groups, M, K]")
    _multiply_masked(rows, matrices, d, masked_m)


def _check_recipes(
    recipe: object, recipe_a: object, recipe_b: object, disable_ue8m0_cast: bool
) -> None:
    for name, value, known in (
        ("recipe", recipe, _RECIPE),
        ("recipe_a", recipe_a, _SIDE_RECIPE),
        ("recipe_b", recipe_b, _SIDE_RECIPE),
    ):
        is_known = value is None or (isinstance(value, (tuple, list)) and tuple(value) == known)
        if not is_known:
            raise ValueError(
                f"{name} must be None or {known}, a scale for 32 values; got {value!r}"
            )
    if disable_ue8m0_cast:
        raise ValueError("disable_ue8m0_cast must be False: scales are UE8M0; got True")


def _rows_of(a: Pair) -> torch.Tensor:
    values, sf = checked_pair("a", a)
    check_dense("a[0]", values)
    if values.dtype != torch.float8_e4m3fn:
        raise TypeError(f"a[0] must be torch.float8_e4m3fn; got {values.dtype}")
    check_memory("a[0]", values)
    _check_width("a[0]", values)
    words = packed_scales("a[1]", sf, tuple(values.shape[:-1]), values.shape[-1])
    return dequantize_e4m3_ue8m0(values, words.contiguous(), torch.bfloat16)


def _matrices_of(b: Pair) -> torch.Tensor:
    weight = packed_weights("b", checked_pair("b", b))
    return dequantize_mxfp4(weight.weight, weight.sf.contiguous(), torch.bfloat16)


def _check_width(name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim == 0 or tensor.shape[-1] == 0 or tensor.shape[-1] % _GROUP:
        raise ValueError(
            f"{name} must have rows of a positive multiple of {_GROUP} values; got shape "
            f"{tuple(tensor.shape)}"
        )


def _check_matrix(name: str, tensor: torch.Tensor, ndim: int, axes: str) -> None:
    require_type(name, tensor, torch.Tensor, "a tensor")
    check_dense(name, tensor)
    if tensor.dtype != torch.bfloat16:
        raise TypeError(f"{name} must be torch.bfloat16; got {tensor.dtype}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must be {axes}; got shape {tuple(tensor.shape)}")
    check_memory(name, tensor)


def _multiply_masked(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, masked_m: torch.Tensor
) -> None:
    num_groups, num_rows = a.shape[:2]
    require_type("masked_m", masked_m, torch.Tensor, "a tensor")
    if masked_m.dtype != torch.int32 or tuple(masked_m.shape) != (num_groups,):
        raise ValueError(
            f"masked_m must be int32 [{num_groups}], a number for each group; got "
            f"{masked_m.dtype} {list(masked_m.shape)}"
        )
    begins = torch.arange(num_groups, dtype=torch.int32, device=a.device) * num_rows
    _multiply(a, b, d, begins, masked_m.clamp(0, num_rows))


def _multiply(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, begins: torch.Tensor, counts: torch.Tensor
) -> None:
    """a: [.., K], whose rows are counted through. begins, counts: int32 [groups], of each the rows.
    Nothing waits for a GPU."""
    num_groups, num_columns, num_values = b.shape
    if a.shape[-1] != num_values or (a.ndim == 3 and a.shape[0] != num_groups):
        raise ValueError(
            f"a must have rows of {num_values} values, as b, and as many groups; got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    for name, size in (("N", num_columns), ("K", num_values)):
        if size == 0 or size % _ALIGNMENT:
            raise ValueError(f"{name} of b must be a positive multiple of {_ALIGNMENT}; got {size}")
    _check_matrix("d", d, a.ndim, "as a")
    check_contiguous("d", d)
    if d.shape != (*a.shape[:-1], num_columns):
        raise ValueError(f"d must have shape {(*a.shape[:-1], num_columns)}; got {tuple(d.shape)}")
    for name, tensor in (("b", b), ("d", d), ("counts of rows", counts)):
        if tensor.device != a.device:
            raise ValueError(f"{name} must be on {a.device}, as a is; got {tensor.device}")
    rows, results = a.reshape(-1, num_values), d.view(-1, num_columns)
    num_rows = rows.shape[0]
    if num_rows == 0:
        return
    # Rows of groups lie one behind the other for the product: of each place there its row here.
    counts = torch.minimum(counts, num_rows - begins).clamp(min=0)
    ends = counts.cumsum(0, dtype=torch.int32)
    place = torch.arange(num_rows, dtype=torch.int32, device=a.device)
    group = torch.bucketize(place, ends, right=True).clamp(max=num_groups - 1)
    is_used = place < ends[-1]
    row = (begins + counts - ends)[group] + place
    row = row.where(is_used, num_rows).long()
    place_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=a.device)
    place_of_row = place_of_row.scatter(0, row, place.long())[:num_rows, None]
    gathered = rows.index_select(0, row.clamp(max=num_rows - 1))
    products = grouped_product(gathered, b.contiguous().transpose(1, 2), ends)
    found = products.index_select(0, place_of_row[:, 0].clamp(min=0))
    results.copy_(found.where(place_of_row >= 0, results))
