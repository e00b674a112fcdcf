"""Cases of `deep-moe fuzz` for `grouped_product`; see fuzzing.py."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from .fuzzing import values_of
from .product_calls import ProductCall

AXES: dict[str, tuple[Any, ...]] = {
    # N: of one tile, of several, of which the last may be shorter.
    "columns": (8, 128, 136, 264),
    # K: a block, as many as stages, and more.
    "values": (128, 256, 768, 1152),
    "experts": (1, 2, 5, 40),
    # Of each expert [experts, rows, K]; the others [rows, K].
    "layout": ("by expert", "one behind the other", "with gaps", "in any order"),
    # The last: more than there are, or before the first.
    "rows": ("any", "few", "all of one expert", "none", "beyond the ends"),
    "scales": ("by row", "by column"),
    "numbers": ("of any size", "exact", "NaN"),
}
CASES_PER_ROUND = 60
_MOST_ROWS = 150  # of an expert, if there are few


@dataclass(frozen=True)
class ProductCase:
    """One call."""

    path: ClassVar[str] = "product"
    arch: ClassVar[str] = "any"  # for who counts cases by it: one target has this kernel

    number: int
    values: Mapping[str, Any]  # of each axis

    @staticmethod
    def axes_of(_arch: str) -> Mapping[str, tuple[Any, ...]]:
        return AXES

    @classmethod
    def of(cls, number: int) -> ProductCase:
        """The case with this number; they go through rounds, as in fuzzing.py."""
        return cls(number, values_of(AXES, number, CASES_PER_ROUND))

    def run(self) -> str:
        """What went wrong, "" if nothing."""
        call = self._call()
        try:
            return call.fault(call.run(), is_exact=self.values["numbers"] == "exact")
        except (AssertionError, RuntimeError) as error:  # the emulator's findings
            return str(error)

    def _call(self) -> ProductCall:
        choose = random.Random(self.number)
        counts = self._counts(choose)
        rows: tuple[int, ...] = (len(counts), max(*counts, 1) + 3)
        begins = None
        if self.values["layout"] != "by expert":
            begins, num_rows = self._begins(counts, choose)
            rows = (num_rows,)
        if self.values["rows"] == "beyond the ends":
            last = choose.randrange(len(counts))
            counts[last] += 1000
            if begins is not None:
                # Nobody's rows may be another's, too: only one expert has some.
                counts = [count * (i == last) for i, count in enumerate(counts)]
                begins[last] = choose.choice([-5, rows[0] - 2, rows[0] + 7])
        call = ProductCall.random(
            rows, self.values["columns"], self.values["values"], counts, begins
        )
        if self.values["numbers"] == "exact":
            call = call.exact()
        elif self.values["numbers"] == "NaN":
            x = call.x.clone()
            x.view(torch.uint8).view(-1, x.shape[-1])[choose.randrange(rows[0])] = 0x7F
            call = replace(call, x=x)
        if self.values["scales"] == "by column":
            call = replace(call, x_sf=call.x_sf.mT.contiguous().mT)
        return call

    def _counts(self, choose: random.Random) -> list[int]:
        """Rows of each expert."""
        num_experts, rows = self.values["experts"], self.values["rows"]
        if rows == "none":
            return [0] * num_experts
        if rows == "all of one expert":
            counts = [0] * num_experts
            counts[choose.randrange(num_experts)] = choose.randint(129, 300)
            return counts
        most = 3 if rows == "few" else max(_MOST_ROWS // num_experts, 3) + 130 * (num_experts < 5)
        return [choose.choice([0, 1, most, choose.randint(0, most)]) for _ in range(num_experts)]

    def _begins(self, counts: list[int], choose: random.Random) -> tuple[list[int], int]:
        """Of each expert's rows, and how many rows there are."""
        order = [*range(len(counts))]
        if self.values["layout"] == "in any order":
            choose.shuffle(order)
        gap = 0 if self.values["layout"] == "one behind the other" else 5
        begins, end = [0] * len(counts), 0
        for expert in order:
            begins[expert] = end
            end += counts[expert] + (choose.randint(0, gap) if gap else 0)
        return begins, max(end, 1)
