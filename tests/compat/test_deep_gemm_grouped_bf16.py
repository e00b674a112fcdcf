"""DeepGEMM's grouped products of BF16 and of E4M3 with E2M1, as its callers call them, against
float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe.compat.deep_gemm as deep_gemm
from deep_moe.compat.deep_gemm.utils import per_token_cast_to_fp4, per_token_cast_to_fp8
from deep_moe.formats.block_scaled import (
    dequantize_e2m1_ue8m0,
    dequantize_e4m3_ue8m0,
    ue8m0_to_float,
    unpack_ue8m0,
)

NUM_GROUPS, N, K, UNTOUCHED = 3, 40, 128, 7.0
IDS = [
    [0] * 9 + [-1] * 3 + [1] * 4 + [2] * 2 + [-1],
    [2] * 5 + [-1] * 2 + [0] * 3,  # any order, and a group without rows
    [-1, -1, -1],
]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


class Bf16:
    """Operands, what they stand for, and the calls that take them."""

    contiguous = staticmethod(deep_gemm.m_grouped_bf16_gemm_nt_contiguous)
    masked = staticmethod(deep_gemm.m_grouped_bf16_gemm_nt_masked)

    def __init__(self, *rows: int) -> None:
        self.a, self.b = random(*rows, K).bfloat16(), random(NUM_GROUPS, N, K).bfloat16()
        self.x, self.w = self.a.double(), self.b.double()


class Fp8Fp4:
    """With scales in words. Other forms of them have a test of their own."""

    contiguous = staticmethod(deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous)
    masked = staticmethod(deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked)

    def __init__(self, *rows: int) -> None:
        values, sf = per_token_cast_to_fp8(random(*rows, K).view(-1, K), True, 32, True)
        self.a = values.view(*rows, K), sf.view(*rows, -1)
        packed, weight_sf = per_token_cast_to_fp4(random(NUM_GROUPS * N, K), True, 32)
        weight_sf = deep_gemm.transform_sf_into_required_layout(
            weight_sf.view(NUM_GROUPS, N, -1), N, K, (1, 32), num_groups=NUM_GROUPS
        )
        self.b = packed.view(NUM_GROUPS, N, -1), weight_sf
        self.x = dequantize_e4m3_ue8m0(*self.a, torch.float64)
        self.w = dequantize_e2m1_ue8m0(self.b[0].view(torch.int8), weight_sf, torch.float64)


KINDS = pytest.mark.parametrize("kind", [Bf16, Fp8Fp4])


def check(d: torch.Tensor, operands: Any, group_of_row: list[int]) -> None:
    """group_of_row: -1 for rows that are left as they were."""
    x = operands.x.view(-1, K)
    for row, group in enumerate(group_of_row):
        found = d.view(-1, N)[row].double()
        if group < 0:
            assert (found == UNTOUCHED).all()
            continue
        exact = x[row] @ operands.w[group].t()
        magnitude = x[row].abs() @ operands.w[group].abs().t()
        bound = exact.abs() * 2.0**-8 + magnitude * (K + 8) * 2.0**-24
        assert ((found - exact).abs() <= bound).all()


def untouched(*rows: int) -> torch.Tensor:
    return torch.full((*rows, N), UNTOUCHED, dtype=torch.bfloat16)


@KINDS
@pytest.mark.parametrize("ids", IDS)
def test_contiguous_rows_by_their_ids(kind: Any, ids: list[int]) -> None:
    operands, d = kind(len(ids)), untouched(len(ids))
    layout = torch.tensor(ids).int()
    assert kind.contiguous(operands.a, operands.b, d, layout) is None
    check(d, operands, ids)


@KINDS
def test_contiguous_rows_by_where_they_end(kind: Any) -> None:
    """Each group's rows begin at a multiple of 128."""
    ends = torch.tensor([5, 128, 128 + 130]).int()  # 5, none and 130
    ids = [0] * 5 + [-1] * 123 + [2] * 130 + [-1] * 6
    operands, d = kind(len(ids)), untouched(len(ids))
    kind.contiguous(operands.a, operands.b, d, ends, use_psum_layout=True)
    check(d, operands, ids)


@KINDS
def test_masked_rows(kind: Any) -> None:
    operands, d = kind(NUM_GROUPS, 6), untouched(NUM_GROUPS, 6)
    masked_m = torch.tensor([4, 0, 7]).int()  # the last has as many as there are
    assert kind.masked(operands.a, operands.b, d, masked_m, 4) is None
    check(d, operands, [0, 0, 0, 0, *[-1] * 8, *[2] * 6])


def test_no_rows_are_no_work() -> None:
    operands, d = Bf16(0), untouched(0)
    Bf16.contiguous(operands.a, operands.b, d, torch.zeros(0).int())


@pytest.mark.parametrize("form", ["float32", "bytes", "e8m0", "by_column"])
def test_scales_in_any_form(form: str) -> None:
    ids = IDS[0]
    operands, d = Fp8Fp4(len(ids)), untouched(len(ids))

    def scales(words: torch.Tensor) -> torch.Tensor:
        if form == "by_column":
            return words.transpose(-1, -2).contiguous().transpose(-1, -2)
        sf = unpack_ue8m0(words)
        if form == "float32":
            return ue8m0_to_float(sf, torch.float32)
        return sf.view(torch.float8_e8m0fnu) if form == "e8m0" else sf

    a, b = ((values, scales(words)) for values, words in (operands.a, operands.b))
    recipes: Any = {"recipe": (1, 1, 32), "recipe_a": (1, 32), "recipe_b": (1, 32)}
    Fp8Fp4.contiguous(a, b, d, torch.tensor(ids).int(), **recipes)
    check(d, operands, ids)


def test_errors_name_the_argument() -> None:
    bf16, fp8, d, layout = Bf16(3), Fp8Fp4(3), untouched(3), torch.zeros(3).int()
    for error, words, call in (
        (
            TypeError,
            r"a must be torch\.bfloat16",
            lambda: Bf16.contiguous(bf16.x, bf16.b, d, layout),
        ),
        (
            ValueError,
            r"b must be \[groups, N, K\]",
            lambda: Bf16.contiguous(bf16.a, bf16.a, d, layout),
        ),
        (
            ValueError,
            "a must have rows of 64 values, as b",
            lambda: Bf16.contiguous(bf16.a, bf16.b[..., :64], d, layout),
        ),
        (
            ValueError,
            "N of b must be a positive multiple of 8; got 39",
            lambda: Bf16.contiguous(bf16.a, bf16.b[:, 1:], d, layout),
        ),
        (
            ValueError,
            r"d must have shape \(3, 40\); got \(2, 40\)",
            lambda: Bf16.contiguous(bf16.a, bf16.b, d[:2], layout),
        ),
        (
            ValueError,
            r"grouped_layout must have shape \(3,\)",
            lambda: Bf16.contiguous(bf16.a, bf16.b, d, layout[:2]),
        ),
        (
            ValueError,
            r"masked_m must be int32 \[3\]",
            lambda: Bf16.masked(Bf16(3, 2).a, bf16.b, untouched(3, 2), layout.long(), 1),
        ),
        (
            ValueError,
            r"recipe must be None or \(1, 1, 32\)",
            lambda: Fp8Fp4.contiguous(fp8.a, fp8.b, d, layout, (1, 128, 128)),
        ),
        (
            ValueError,
            r"recipe_a must be None or \(1, 32\)",
            lambda: Fp8Fp4.contiguous(fp8.a, fp8.b, d, layout, recipe_a=(1, 128)),
        ),
        (
            ValueError,
            "disable_ue8m0_cast must be False",
            lambda: Fp8Fp4.contiguous(fp8.a, fp8.b, d, layout, disable_ue8m0_cast=True),
        ),
        (
            TypeError,
            "b must be a pair of values and scales",
            lambda: Fp8Fp4.contiguous(fp8.a, fp8.b[0], d, layout),
        ),
        (
            TypeError,
            r"a\[0\] must be torch\.float8_e4m3fn",
            lambda: Fp8Fp4.contiguous((bf16.a, fp8.a[1]), fp8.b, d, layout),
        ),
        (
            ValueError,
            r"a\[1\] must hold one scale per 32 values",
            lambda: Fp8Fp4.contiguous((fp8.a[0], fp8.a[1][:2]), fp8.b, d, layout),
        ),
    ):
        with pytest.raises(error, match=words):
            call()
