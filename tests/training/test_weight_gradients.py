"""Sums over each expert's rows of quantized operands, under the emulator's checks, against
float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from deep_moe.fused.gpu import gpu_of
from deep_moe.heuristics.products import K_GROUP, GroupedProductConfig
from deep_moe.targets import products_target
from deep_moe.training import launching
from deep_moe.training.grouped_product import sum_rows
from deep_moe.training.quantized import QuantizedColumns, max_row_blocks


@dataclass(frozen=True)
class Case:
    """num_rows: of each expert. Operands are [blocks, num_inputs or num_outputs, 128]."""

    num_rows: tuple[int, ...]
    num_inputs: int
    num_outputs: int

    @property
    def num_blocks(self) -> list[int]:
        return [max(-(-rows // K_GROUP), 1) for rows in self.num_rows]

    def operands(self, *, is_exact: bool) -> list[QuantizedColumns]:
        """is_exact: with values whose sums the 13 bits of Hopper's FP8 products hold. Where an
        expert has no row there are zeros; blocks of nobody are NaN."""
        generator = torch.Generator().manual_seed(sum(self.num_rows))
        num_blocks = max_row_blocks(sum(self.num_rows), len(self.num_rows))
        made = []
        for size in (self.num_inputs, self.num_outputs):
            shape = (num_blocks, size, K_GROUP)
            scale_shape = (num_blocks, size // K_GROUP)
            if is_exact:
                values = torch.randint(-3, 4, shape, generator=generator).float()
                scales = torch.randint(-2, 3, scale_shape, generator=generator).float().exp2()
            else:
                values = torch.randn(shape, generator=generator) * 100
                scales = torch.rand(scale_shape, generator=generator) + 0.1
            block = 0
            for rows, own in zip(self.num_rows, self.num_blocks, strict=True):
                block += own
                values[block - 1, :, rows - (own - 1) * K_GROUP :] = 0
            values[block:], scales[block:] = torch.nan, torch.nan
            made.append(QuantizedColumns(values.to(torch.float8_e4m3fn), scales))
        return made

    def sums(
        self, operands: list[QuantizedColumns], out: torch.Tensor, **options: bool
    ) -> torch.Tensor:
        """What `sum_rows` makes of out, on out's device."""
        device = out.device
        x, d_y = (QuantizedColumns(o.values.to(device), o.scales.to(device)) for o in operands)
        ends = torch.tensor(self.num_rows, device=device).cumsum(0).int()
        gpu = gpu_of(device)
        arch = products_target().name if gpu is None else gpu.target.name
        sum_rows(x, d_y, ends, out, gpu, arch, **options)
        return out

    def full(self, value: float, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        shape = (len(self.num_rows), self.num_inputs, self.num_outputs)
        return torch.full(shape, value, dtype=dtype, device=device)

    def check_added(self, device: str = "cpu") -> None:
        """To BF16, the bits of a product and an addition. To float32, the sums without a rounding
        to BF16: those added to zero are within BF16's rounding of it, and others are an addition of
        these."""
        operands = self.operands(is_exact=False)
        product = self.sums(operands, self.full(torch.nan, torch.bfloat16, device))
        before = torch.randn(product.shape, generator=torch.Generator().manual_seed(1)).to(device)
        before *= product.float().std()
        added = self.sums(operands, before.bfloat16(), adds=True)
        assert torch.equal(added, before.bfloat16() + product)
        exact = self.sums(operands, self.full(0, torch.float32, device), adds=True)
        assert torch.equal(exact.bfloat16(), product)
        assert torch.equal(self.sums(operands, before.clone(), adds=True), before + exact)
        is_rounded = any(self.num_rows)
        assert torch.equal(exact, product.float()) is not is_rounded

    def check(self, device: str = "cpu", *, is_exact: bool = False) -> None:
        """Right to within float32's roundings of sums in any order and one to BF16; or to the
        bit."""
        operands = self.operands(is_exact=is_exact)
        out = self.sums(operands, self.full(torch.nan, torch.bfloat16, device))
        wide = [
            o.values.double() * o.scales.double().repeat_interleave(K_GROUP, 1).unsqueeze(2)
            for o in operands
        ]
        block = 0
        for found, num_blocks in zip(out.cpu().double(), self.num_blocks, strict=True):
            a, b = (w[block : block + num_blocks].transpose(0, 1).flatten(1) for w in wide)
            exact = a @ b.t()
            if is_exact:
                assert torch.equal(found, exact.float().bfloat16().double())
            bound = exact.abs() * 2.0**-8 + a.abs() @ b.abs().t() * (a.shape[1] + 8) * 2.0**-24
            assert ((found - exact).abs() <= bound).all()
            block += num_blocks


CASES = {
    "one row": Case((1,), 128, 128),
    "experts without rows": Case((0, 136, 0, 8), 256, 128),
    "many blocks": Case((1200, 128, 0), 128, 256),
    "an odd m-block, and columns behind the last": Case((40, 260), 384, 384),
    "more tiles than stages and CTAs": Case((264, 16, 0, 520), 256, 640),
    "nobody has rows": Case((0, 0), 128, 128),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_right(name: str) -> None:
    CASES[name].check()


@pytest.mark.parametrize("name", CASES)
def test_exact_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums as Hopper's tensor cores make them."""
    as_hardware = partial(launching.run_emulated, hopper_fp8_sums=True)
    monkeypatch.setattr(launching, "run_emulated", as_hardware)
    CASES[name].check(is_exact=True)


@pytest.mark.parametrize(
    "name", ["one row", "experts without rows", "an odd m-block, and columns behind the last"]
)
def test_sums_are_added(name: str) -> None:
    CASES[name].check_added()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    CASES[name].check("cuda", is_exact=True)
    CASES[name].check_added("cuda")


def test_ctas_with_a_tile() -> None:
    config = GroupedProductConfig(sums_rows=True, arch="sm_90a")
    assert config.max_ctas(256, num_experts=3, num_columns=640) == 3 * 2 * 3
    assert config.max_ctas(128, num_experts=1, num_columns=128) == 2  # a whole cluster
