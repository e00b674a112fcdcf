"""DeepGEMM's grouped products, as its callers call them, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe.compat.deep_gemm as deep_gemm
from deep_moe.compat.deep_gemm.utils import per_token_cast_to_fp8
from deep_moe.formats.float_scaled import dequantize_e4m3_float

NUM_GROUPS, N, K, UNTOUCHED = 3, 192, 256, 7.0


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    values = random(NUM_GROUPS, N, K).to(torch.float8_e4m3fn)
    return values, random(NUM_GROUPS, 2, K // 128).abs() + 0.1


def rows_of(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = per_token_cast_to_fp8(random(*shape).flatten(0, -2), False, 128)
    return values.view(shape), scales.view(*shape[:-1], -1)


def check(
    d: torch.Tensor,
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    group_of_row: list[int],
) -> None:
    """group_of_row: -1 for rows that are left as they were."""
    x = dequantize_e4m3_float(*a, torch.float64).view(-1, K)
    scales = b[1].double().repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)
    w = b[0].double() * scales
    for row, group in enumerate(group_of_row):
        found = d.view(-1, N)[row].double()
        if group < 0:
            assert (found == UNTOUCHED).all()
            continue
        exact = x[row] @ w[group].t()
        magnitude = x[row].abs() @ w[group].abs().t()
        bound = exact.abs() * 2.0**-8 + magnitude * (K + 8) * 2.0**-24
        assert ((found - exact).abs() <= bound).all()


def contiguous(a: Any, b: Any, layout: torch.Tensor, **options: Any) -> torch.Tensor:
    d = torch.full((a[0].shape[0], N), UNTOUCHED, dtype=torch.bfloat16)
    assert deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, **options) is None
    return d


@pytest.mark.parametrize(
    "ids",
    [
        [0] * 9 + [-1] * 3 + [1] * 4 + [2] * 2 + [-1],
        [2] * 5 + [-1] * 2 + [0] * 3,  # any order, and a group without rows
        [-1, -1, -1],
    ],
)
def test_contiguous_rows_by_their_ids(ids: list[int]) -> None:
    a, b = rows_of(len(ids), K), weights()
    layout = torch.tensor(ids).int()
    d = contiguous(a, b, layout, recipe=(1, 128, 128), disable_ue8m0_cast=True)
    check(d, a, b, ids)


def test_contiguous_rows_by_where_they_end() -> None:
    """Each group's rows begin at a multiple of the alignment."""
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    assert alignment == deep_gemm.get_m_alignment_for_contiguous_layout() == 128
    ends = torch.tensor([5, alignment, alignment + 130]).int()  # 5, none and 130
    ids = [0] * 5 + [-1] * (alignment - 5) + [2] * 130 + [-1] * 6
    a, b = rows_of(len(ids), K), weights()
    check(contiguous(a, b, ends, use_psum_layout=True), a, b, ids)


def test_masked_rows_and_scales_by_column() -> None:
    a, b = rows_of(NUM_GROUPS, 6, K), weights()
    by_column = a[1].transpose(1, 2).contiguous().transpose(1, 2)
    d = torch.full((NUM_GROUPS, 6, N), UNTOUCHED, dtype=torch.bfloat16)
    masked_m = torch.tensor([4, 0, 6]).int()
    assert deep_gemm.m_grouped_fp8_gemm_nt_masked((a[0], by_column), b, d, masked_m, 4) is None
    check(d, a, b, [0, 0, 0, 0, *[-1] * 8, *[2] * 6])


@pytest.mark.parametrize("ids", [[0, 1, 0], [0, -1, 0], [0, 3, 1], [-2, 0, 0]])
def test_ids_that_are_not_together_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="grouped_layout must hold ids of 3 groups or -1, and a"):
        contiguous(rows_of(3, K), weights(), torch.tensor(ids).int())


def test_errors_name_the_argument() -> None:
    a, b, layout = rows_of(3, K), weights(), torch.zeros(3).int()
    with pytest.raises(ValueError, match=r"recipe must be None or \(1, 128, 128\)"):
        contiguous(a, b, layout, recipe=(1, 1, 32))
    with pytest.raises(TypeError, match="b must be a pair of values and scales"):
        contiguous(a, b[0], layout)
    with pytest.raises(TypeError, match=r"grouped_layout must be torch\.int32"):
        contiguous(a, b, layout.long())
    with pytest.raises(ValueError, match=r"grouped_layout must have shape \(3,\)"):
        contiguous(a, b, layout[:2])
    with pytest.raises(ValueError, match=r"a\[0\] must be \[M, K\]"):
        contiguous(rows_of(1, 3, K), b, layout)
