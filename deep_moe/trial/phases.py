"""What bounds each phase of a simulated call: busy units, or else what its roles wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deep_moe.traces.timeline import Series, Timeline

from .trace import breakdown
from .trace.rank_trace import RankTrace

BOUND_SHARE = 0.6  # of what a unit can do, from which it is said to bound a call or a phase
# A phase ends where the next one begins: with these moments of `breakdown`.
_ENDS = {
    "dispatch": "first block begins, mean CTA",
    "Linear1": "last Linear1 block ends, last CTA",
    "Linear2": "last block ends, last CTA",
    "combine": "kernel ends",
}
_UNITS = {
    "memory": ("memory",),
    "tensor cores": ("tensor cores",),
    "links": ("links in", "links out"),
    "L2": ("L2",),
}


def bound_by(shares: Mapping[str, float]) -> str:
    """The unit that bounds what takes such shares of what units can do.

    >>> bound_by({"memory": 0.7, "L2": 0.2}), bound_by({"memory": 0.5, "L2": 0.2})
    ('memory', 'latencies')
    """
    busiest = max(shares, key=lambda name: shares[name])
    return busiest if shares[busiest] >= BOUND_SHARE else "latencies"


def phase_bounds(ranks: Sequence[RankTrace], timeline: Timeline) -> list[dict[str, Any]]:
    """Of each phase: from when until when, what its units were busy with, and what the mean warp of
    each role did meanwhile, in microseconds.

    Phases overlap from CTA to CTA. Here one lasts from the end of the one before until the moment
    that `_ENDS` names, in the mean over ranks.

    Args:
        ranks: aligned.
        timeline: of the same ranks, with how busy units were.
    """
    moments = breakdown(ranks)["timeline"]
    phases = []
    start_us = 0.0
    for name, moment in _ENDS.items():
        end_us = moments.get(moment)
        if end_us is None or end_us <= start_us:
            continue
        start_ns, end_ns = 1e3 * start_us, 1e3 * end_us
        shares = {
            unit: max(_share(timeline.series, part, start_ns, end_ns) for part in parts)
            for unit, parts in _UNITS.items()
        }
        phases.append(
            {
                "name": name,
                "start_us": start_us,
                "end_us": end_us,
                "us": end_us - start_us,
                "bound_by": bound_by(shares),
                "shares": shares,
                "roles": _roles(timeline, start_ns, end_ns),
            }
        )
        start_us = end_us
    return phases


def longest_wait(phase: Mapping[str, Any], timeline: Timeline) -> tuple[str, str, float]:
    """Of the roles that compute, what the mean warp waited for longest: role, step, microseconds.
    Empty words if nobody waited."""
    waits = {
        step for step, kind in zip(timeline.steps, timeline.kinds, strict=True) if kind.awaited
    }
    found = [
        (us, role, step)
        for role, spent in phase["roles"].items()
        if role in ("math", "epilogue")
        for step, us in spent.items()
        if step in waits
    ]
    us, role, step = max(found, default=(0.0, "", ""))
    return role, step, us


def _share(series: Sequence[Series], name: str, start_ns: float, end_ns: float) -> float:
    """The mean over ranks."""
    shares = []
    for one in series:
        if one.name != name:
            continue
        begins = one.start_ns + one.step_ns * np.arange(len(one.shares))
        common = np.minimum(begins + one.step_ns, end_ns) - np.maximum(begins, start_ns)
        shares.append(float((one.shares * np.maximum(common, 0.0)).sum()) / (end_ns - start_ns))
    return float(np.mean(shares)) if shares else 0.0


def _roles(timeline: Timeline, start_ns: float, end_ns: float) -> dict[str, dict[str, float]]:
    """What the mean warp of each role spent in a stretch of time on each step."""
    spans = timeline.spans
    common = np.minimum(spans["end_ns"], end_ns) - np.maximum(spans["start_ns"], start_ns)
    spent_us = np.maximum(common, 0.0) / 1e3
    roles: dict[str, dict[str, float]] = {}
    names = np.array([lane.role for lane in timeline.lanes])
    for role in dict.fromkeys(names.tolist()):
        own = names[spans["lane"]] == role
        sums = np.bincount(spans["step"][own], spent_us[own], len(timeline.steps))
        count = int((names == role).sum())
        roles[role] = {
            timeline.steps[step]: float(sums[step]) / count
            for step in np.flatnonzero(sums).tolist()
        }
    return roles
