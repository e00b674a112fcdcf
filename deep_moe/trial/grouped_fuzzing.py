"""Cases of `deep-moe fuzz` for `GroupedExperts`, whose tokens lie by their expert already; see
fuzzing.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from deep_moe.heuristics import MoEShape

from .comparison import compare
from .fuzzing import SMALL_POOL, FuzzCase, axes
from .grouped_calls import Case, exact_case, run_behind_each_other, run_padded, shape_of

NUM_CALLS = 2
MAX_ROWS = 400  # more than a small pool has
# Experts, hidden, intermediate.
_SHAPES = ((1, 256, 256), (4, 384, 128), (33, 128, 128))


@lru_cache
def grouped_axes(arch: str) -> dict[str, tuple[Any, ...]]:
    """What cases of an architecture differ in; where it says nothing, as in the fused call's."""
    fused = axes(arch)
    return {
        "weights": fused["weights"],
        "shape": _SHAPES,
        "tile": fused["tile"],
        "biases": fused["biases"],
        "pool": (None, SMALL_POOL),
        # So far all is compiled in.
        # By expert [experts, rows, hidden]; the others [rows, hidden].
        "layout": ("by expert", "one behind the other", "at multiples of 128"),
        "rows": ("any", "few", "as many as there may be", "all of one expert", "none"),
        # Of the emulator: other orders of warps.
        "seed": tuple(range(4)),
    }


@dataclass(frozen=True)
class GroupedCase(FuzzCase):
    """Two calls of one object."""

    path: ClassVar[str] = "grouped"
    num_held: ClassVar[int] = 5

    @staticmethod
    def axes_of(arch: str) -> dict[str, tuple[Any, ...]]:
        return grouped_axes(arch)

    @property
    def has_gate(self) -> bool:
        return True

    @property
    def shape(self) -> MoEShape:
        return shape_of(self._sizes(0), self._formats[0], **self._options)

    def run(self) -> str:
        """What went wrong, "" if nothing."""
        choose = random.Random(self.number)
        try:
            for call_idx, (case, y) in enumerate(self._results(choose)):
                comparison = compare(y, case.exact())
                if not comparison.is_right:
                    return f"call {call_idx}, rows {case.counts}: {comparison}"
        except (AssertionError, RuntimeError) as error:  # of rows of no expert; the emulator's
            return str(error)
        return ""

    def _results(self, choose: random.Random) -> Iterator[tuple[Case, Any]]:
        cases = [
            exact_case(self.arch, counts, self._formats[0], **self._options)
            for counts in (self._rows(choose) for _ in range(NUM_CALLS))
        ]
        with cases[0].experts(
            num_sms=4,
            overrides=dict(self.target_weights.fuzz_tiles[self.values["tile"]]),
            schedule_seed=self.values["seed"],
            num_pool_tokens=self.values["pool"],
        ) as experts:
            for case in cases:
                layout = self.values["layout"]
                if layout == "by expert":
                    most = max(*case.counts, 1)
                    yield case, run_padded(case, most + choose.choice([0, 9]), experts)
                else:
                    alignment = 1 if layout == "one behind the other" else 128
                    yield case, run_behind_each_other(case, alignment, experts)

    @property
    def _options(self) -> dict[str, Any]:
        _, hidden, intermediate_hidden = self.values["shape"]
        return {
            "hidden": hidden,
            "intermediate_hidden": intermediate_hidden,
            "num_max_tokens_per_rank": MAX_ROWS,
            "biases": self.values["biases"] == "both layers",
            "num_pool_tokens": self.values["pool"],
            "token_format": self._formats[1],
        }

    def _sizes(self, rows: int) -> tuple[int, ...]:
        return (rows,) * self.values["shape"][0]

    def _rows(self, choose: random.Random) -> tuple[int, ...]:
        """Rows of each expert."""
        num_experts = len(self._sizes(0))
        rows = self.values["rows"]
        most = MAX_ROWS // num_experts
        if rows == "none":
            return self._sizes(0)
        if rows == "all of one expert":
            owner = choose.randrange(num_experts)
            return tuple(choose.randint(130, 300) * (i == owner) for i in range(num_experts))
        if rows == "as many as there may be":
            return (most,) * num_experts
        highest = 3 if rows == "few" else most
        return tuple(
            choose.choice([0, 1, highest, choose.randint(0, highest)]) for _ in range(num_experts)
        )
