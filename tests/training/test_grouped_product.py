"""Products of quantized rows and weights, under the emulator's checks, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import jit
from deep_moe.heuristics.products import GroupedProductConfig
from deep_moe.training import launching
from deep_moe.trial.product_calls import ProductCall

CASES = {
    "one row": ProductCall.random((1,), 8, 128, [1], [0]),
    "uneven, with gaps": ProductCall.random((300,), 200, 384, [150, 0, 100], [8, 0, 170]),
    "one expert for all": ProductCall.random((260,), 136, 256, [0, 260, 0, 0], [0, 0, 260, 260]),
    "nobody has rows": ProductCall.random((40,), 128, 256, [0, 0], [0, 0]),
    "begins and counts outside of x": ProductCall.random((70,), 72, 128, [9, 50, 3], [-4, 60, 200]),
    "more tiles than stages and CTAs": ProductCall.random(
        (600,), 264, 1152, [129, 256, 1], [0, 136, 400]
    ),
    "pairs of tiles, a tile alone and columns behind the last": ProductCall.random(
        (340,), 608, 256, [300, 40], [0, 300]
    ),
    "first rows of each expert": ProductCall.random((3, 140), 144, 256, [131, 0, 5]),
    "counts beyond an expert's rows": ProductCall.random((2, 24), 128, 128, [30, 24]),
    "by ends": replace(
        ProductCall.random((256,), 72, 256, [0, 130, 0, 100], [0, 0, 130, 130]), by_ends=True
    ),
    "128 experts": ProductCall.random((160,), 64, 128, [1] * 128, [*range(128)]),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_right(name: str) -> None:
    CASES[name].check(CASES[name].run())


def test_no_rows_at_all() -> None:
    for case in (
        ProductCall.random((0,), 16, 128, [0], [0]),
        ProductCall.random((2, 0), 16, 128, [0, 0]),
    ):
        assert case.run().numel() == 0


def test_scales_may_lie_by_column() -> None:
    by_rows = CASES["first rows of each expert"]
    padded = torch.zeros(3, 2, 144)
    padded[:, :, :140] = by_rows.x_sf.transpose(1, 2)
    by_columns = replace(by_rows, x_sf=padded.transpose(1, 2)[:, :140])
    assert by_columns.x_sf.stride() == (288, 1, 144)
    assert torch.equal(by_columns.run(), by_rows.run())


@pytest.mark.parametrize("name", ["uneven, with gaps", "first rows of each expert"])
def test_rows_may_lie_apart(name: str) -> None:
    case = CASES[name]
    wide = torch.zeros(*case.x.shape[:-1], case.x.shape[-1] + 48, dtype=torch.uint8)
    apart = wide[..., : case.x.shape[-1]].view(torch.float8_e4m3fn)
    apart.copy_(case.x)
    assert torch.equal(replace(case, x=apart).run(), case.run())


def test_what_is_not_finite_stays_in_its_row() -> None:
    case = CASES["uneven, with gaps"]
    x = case.x.clone()
    x.view(torch.uint8)[20, 5] = 0x7F
    x.view(torch.uint8)[5] = 0x7F  # of nobody
    spoiled = replace(case, x=x)
    y = spoiled.run()
    spoiled.check(y)
    assert y[20].isnan().all()
    assert y.isnan().any(1).sum() == 1


def test_runs_are_bit_equal() -> None:
    case = CASES["more tiles than stages and CTAs"]
    assert torch.equal(case.run(), case.run())


def test_a_new_tensor_without_out() -> None:
    case = CASES["one row"]
    operands = (case.x, case.x_sf, case.weight, case.weight_sf, case.count, case.begin)
    assert torch.equal(deep_moe.grouped_product(*operands), case.run())


VALID = CASES["first rows of each expert"]
APART = torch.zeros(3, 140, 264).to(torch.float8_e4m3fn)
WIDER = torch.zeros(3, 144, 272).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": None}, TypeError, "x must be a tensor; got NoneType"),
        ({"x": VALID.x.float()}, TypeError, "x must be torch.float8_e4m3fn"),
        ({"x": VALID.x[0]}, ValueError, r"x must be \[3 experts, rows, K\] without expert_begin"),
        ({"begin": VALID.count}, ValueError, r"x must be \[rows, K\] with expert_begin"),
        ({"x": VALID.x[:, ::2]}, ValueError, r"x_sf must have shape \(3, 70, 2\)"),
        ({"x": VALID.x.transpose(1, 2)}, ValueError, r"x must have shape \(3, 256, 256\)"),
        ({"x": VALID.x.mT.contiguous().mT}, ValueError, "x must have contiguous rows, evenly"),
        ({"x": APART[:, :140, :256]}, ValueError, "x must have contiguous rows, evenly"),
        ({"x": WIDER[:, :140, :256]}, ValueError, "x must have contiguous rows, evenly"),
        ({"x_sf": VALID.x_sf.double()}, TypeError, "x_sf must be torch.float32"),
        ({"x_sf": VALID.x_sf[:, :, :1]}, ValueError, r"x_sf must have shape \(3, 140, 2\)"),
        ({"weight": VALID.weight[0]}, ValueError, r"weight must be \[experts, N, K\]"),
        ({"weight": VALID.weight[:0]}, ValueError, "weight must have 1 to 1024 experts; got 0"),
        ({"weight": VALID.weight[:, :4]}, ValueError, "positive multiple of 8 rows .* got 4"),
        ({"weight": VALID.weight[:, :, :64]}, ValueError, "multiple of 128 columns .* got 64"),
        ({"weight": VALID.weight[:, ::2]}, ValueError, r"weight_sf must have shape \(3, 1, 2\)"),
        ({"weight_sf": VALID.weight_sf[:2]}, ValueError, "weight_sf must have shape"),
        ({"weight_sf": VALID.weight_sf.expand(3, 2, 2).mT}, ValueError, "weight_sf must be cont"),
        ({"count": VALID.count.long()}, TypeError, "expert_count must be torch.int32"),
        ({"count": VALID.count[:2]}, ValueError, r"expert_count must have shape \(3,\)"),
    ],
)
def test_errors_name_the_argument(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    case = replace(VALID, **changes)
    operands = (case.x, case.x_sf, case.weight, case.weight_sf, case.count, case.begin)
    with pytest.raises(error, match=text):
        deep_moe.grouped_product(*operands)


def test_errors_of_out_and_arch() -> None:
    operands = (VALID.x, VALID.x_sf, VALID.weight, VALID.weight_sf, VALID.count)
    for out, error, text in (
        (torch.empty(3, 140, 144), TypeError, "out must be torch.bfloat16"),
        (torch.empty(3, 140, 136).bfloat16(), ValueError, "out must have shape"),
        (torch.empty(3, 144, 140).bfloat16().mT, ValueError, "out must be contiguous"),
        (VALID.x.view(torch.bfloat16)[:, :, :0], ValueError, "out must have shape"),
    ):
        with pytest.raises(error, match=text):
            deep_moe.grouped_product(*operands, out=out)
    with pytest.raises(ValueError, match=r"arch must be sm_90a, the only one .* got sm_100a"):
        deep_moe.grouped_product(*operands, arch="sm_100a")
    with pytest.raises(ValueError, match="arch must be one of"):
        deep_moe.grouped_product(*operands, arch="sm_80")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sums_rows": True},
        {"sums_rows": True, "adds": True},
        {"sums_rows": True, "adds": True, "y_bytes": 4},
    ],
    ids=str,
)
def test_no_spills_and_no_serialized_products(fields: dict[str, Any]) -> None:
    config = GroupedProductConfig(**fields, arch="sm_90a")
    compilation = jit.compile_source(
        jit.render_kernel(config),
        arch=config.arch,
        include_paths=jit.find_headers().include_paths,
        kernel=config.kernel_name,
    )
    resources = compilation.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert resources.num_registers * config.num_threads <= 65536
    assert config.smem_bytes <= 227 << 10
    assert "warning" not in compilation.log.lower(), compilation.log
    assert "serialized" not in compilation.log, compilation.log


@pytest.mark.parametrize("name", CASES)
def test_exact_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums as Hopper's tensor cores make them."""
    as_hardware = partial(launching.run_emulated, hopper_fp8_sums=True)
    monkeypatch.setattr(launching, "run_emulated", as_hardware)
    case = CASES[name].exact()
    case.check(case.run(), is_exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    case = CASES[name].exact()
    moved: dict[str, Any] = {
        field: value.cuda() if isinstance(value, torch.Tensor) else value
        for field, value in vars(case).items()
    }
    case.check(ProductCall(**moved).run().cpu(), is_exact=True)
