"""How busy the units of a GPU were over time, on a simulated clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitUsage:
    """One unit, in steps of equal length from the beginning of the run.

    Attributes:
        step_ns: length of a step. Runs that take long have longer steps.
        shares: of each step the unit was busy, 0 to 1.
    """

    step_ns: float
    shares: tuple[float, ...]

    def share(self, start_ns: float, end_ns: float) -> float:
        """Of a stretch of time the unit was busy, 0 to 1.

        Args:
            start_ns: where the stretch begins.
            end_ns: where it ends, later.

        >>> UnitUsage(100.0, (1.0, 0.5)).share(0.0, 400.0)
        0.375
        """
        busy_ns = 0.0
        for i, share in enumerate(self.shares):
            begin = i * self.step_ns
            common = min(end_ns, begin + self.step_ns) - max(start_ns, begin)
            busy_ns += share * max(common, 0.0)
        return busy_ns / (end_ns - start_ns)


@dataclass(frozen=True)
class GpuUsage:
    """One GPU.

    Attributes:
        rank: whose it is.
        begin_ns: what %globaltimer said when the run began.
        units: by name: "memory", "L2", "links in", "links out" and "tensor cores", whose share is
            that of all SMs.
    """

    rank: int
    begin_ns: int
    units: Mapping[str, UnitUsage]


def decode_usage(text: str) -> list[GpuUsage]:
    return [
        GpuUsage(
            one.pop("rank"),
            one.pop("begin_ns"),
            {
                name: UnitUsage(unit["step"] / 1e3, tuple(unit["shares"]))
                for name, unit in one.items()
            },
        )
        for one in json.loads(text)
    ]
