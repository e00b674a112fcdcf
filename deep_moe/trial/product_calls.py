"""Calls of `grouped_product`, and what has to come of them, by float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_moe.formats.float_scaled import dequantize_e4m3_float, quantize_e4m3_float
from deep_moe.fused.gpu import gpu_of
from deep_moe.targets import products_target
from deep_moe.training.grouped_product import grouped_product, multiply

UNTOUCHED = 7.0


@dataclass
class ProductCall:
    """Operands of a call. x: [rows, K] with begin, otherwise [experts, N_e, K].

    by_ends: experts' rows lie one behind the other, and the call is `multiply`'s, which is told
    where they end, as the layer calls it.
    """

    x: torch.Tensor
    x_sf: torch.Tensor
    weight: torch.Tensor
    weight_sf: torch.Tensor
    count: torch.Tensor
    begin: torch.Tensor | None = None
    by_ends: bool = False

    @classmethod
    def random(
        cls,
        rows: tuple[int, ...],
        num_columns: int,
        num_values: int,
        count: list[int],
        begin: list[int] | None = None,
    ) -> ProductCall:
        generator = torch.Generator().manual_seed(num_columns + num_values)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        x, x_sf = quantize_e4m3_float(random(*rows, num_values))
        weight = random(len(count), num_columns, num_values).to(torch.float8_e4m3fn)
        num_blocks = -(-num_columns // 128), num_values // 128
        weight_sf = random(len(count), *num_blocks).abs() + 0.1
        begins = None if begin is None else torch.tensor(begin).int()
        return cls(x, x_sf, weight, weight_sf, torch.tensor(count).int(), begins)

    def exact(self) -> ProductCall:
        """Same sizes, with values whose sums the 13 bits of Hopper's FP8 products hold: numbers up
        to 3, and scales that are powers of two."""
        generator = torch.Generator().manual_seed(1)

        def integers(like: torch.Tensor) -> torch.Tensor:
            return torch.randint(-3, 4, like.shape, generator=generator).to(like.dtype)

        def powers(like: torch.Tensor) -> torch.Tensor:
            return torch.randint(-2, 3, like.shape, generator=generator).float().exp2()

        return replace(
            self,
            x=integers(self.x),
            weight=integers(self.weight),
            x_sf=powers(self.x_sf),
            weight_sf=powers(self.weight_sf),
        )

    def run(self, **options: Any) -> torch.Tensor:
        shape = (*self.x.shape[:-1], self.weight.shape[1])
        y = torch.full(shape, UNTOUCHED, dtype=torch.bfloat16, device=self.x.device)
        operands = (self.x, self.x_sf, self.weight, self.weight_sf)
        if self.by_ends:
            ends = self.count.cumsum(0).int()
            gpu = gpu_of(self.x.device)
            multiply(*operands, y, gpu, products_target().name, expert_end=ends, **options)
        elif grouped_product(*operands, self.count, self.begin, out=y, **options) is not y:
            raise AssertionError("y is not in out")
        return y

    def fault(self, y: torch.Tensor, *, is_exact: bool = False) -> str:
        """What is wrong with y, "" if nothing: each used row must be right to within float32's
        roundings of sums in any order and one to BF16, or to the bit, and all others as they
        were."""
        num_columns, num_values = self.weight.shape[1:]
        x = dequantize_e4m3_float(self.x, self.x_sf, torch.float64).view(-1, num_values)
        scales = self.weight_sf.double().repeat_interleave(128, 1)[:, :num_columns]
        weights = self.weight.double() * scales.repeat_interleave(128, 2)
        y = y.double().view(-1, num_columns)
        is_used = torch.zeros(len(x), dtype=torch.bool)
        for expert, rows in enumerate(self.rows()):
            exact = x[rows] @ weights[expert].t()
            if is_exact and not torch.equal(y[rows], exact.float().bfloat16().double()):
                return f"expert {expert}: sums that are exact differ"
            magnitude = x[rows].abs() @ weights[expert].abs().t()
            bound = exact.abs() * 2.0**-8 + magnitude * (num_values + 8) * 2.0**-24
            # A NaN of a token is its row's.
            if not torch.equal(y[rows].isnan(), exact.isnan()):
                return f"expert {expert}: other values than those of NaN tokens are NaN"
            if ((y[rows] - exact).abs() > bound).any():
                return f"expert {expert}: a sum is farther off than rounding explains"
            is_used[rows] = True
        if not (y[~is_used] == UNTOUCHED).all():
            return "a row of no expert was written"
        return ""

    def check(self, y: torch.Tensor, *, is_exact: bool = False) -> None:
        """Raise AssertionError for a fault."""
        fault = self.fault(y, is_exact=is_exact)
        if fault:
            raise AssertionError(fault)

    def rows(self) -> list[slice]:
        """Each expert's."""
        per_expert = self.x.shape[-2]
        counts = self.count.tolist()
        if self.begin is None:
            begins = [e * per_expert for e in range(len(counts))]
            counts = [min(count, per_expert) for count in counts]
        else:
            begins = self.begin.tolist()
        total = self.x.numel() // self.x.shape[-1]
        return [
            slice(min(max(b, 0), total), min(max(b + c, 0), total))
            for b, c in zip(begins, counts, strict=True)
        ]
