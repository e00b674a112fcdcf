"""The clock of an SM, in nanoseconds of its GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TraceClock:
    """Nanoseconds of each CTA's ticks."""

    first_ticks: np.ndarray  # uint64 [ctas]
    first_ns: np.ndarray  # float64 [ctas], from a moment that all CTAs of the rank share
    ns_per_tick: float
    error_ns: float

    @classmethod
    def emulated(cls, num_ctas: int) -> TraceClock:
        return cls(np.zeros(num_ctas, np.uint64), np.zeros(num_ctas), 1.0, 0.0)

    @classmethod
    def through(cls, ctas: np.ndarray) -> TraceClock:
        """All SMs of a GPU run at one frequency, so the CTAs share one slope: their median."""
        first, last = ctas["first"], ctas["last"]
        if not (first["global_ns"].all() and last["global_ns"].all()):
            raise ValueError("the call did not run to its end: a CTA has taken no anchor")
        ticks = (last["ticks"] - first["ticks"]).astype(np.float64)
        # 64-bit integers up to here: a double cannot tell today's nanoseconds apart.
        begin_ns = (first["global_ns"] - first["global_ns"].min()).astype(np.float64)
        passed_ns = (last["global_ns"] - first["global_ns"]).astype(np.float64)
        ns_per_tick = float(np.median(passed_ns / ticks))
        error_ns = float(np.abs(passed_ns - ns_per_tick * ticks).max())
        return cls(first["ticks"], begin_ns, ns_per_tick, error_ns)
