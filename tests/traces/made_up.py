"""Timelines by hand."""

from __future__ import annotations

import numpy as np

from deep_moe.traces.related import relate
from deep_moe.traces.timeline import Lane, Series, Timeline, empty_spans, in_order

# role, step, start and end in ns, what it says of its block
Row = tuple[str, str, float, float, dict[str, int]]


def timeline_of_rows(
    ctas: dict[tuple[int, int], list[Row]], series: tuple[Series, ...] = ()
) -> Timeline:
    """ctas: by rank and index in the grid."""
    lanes: list[Lane] = []
    steps: list[str] = []
    rows = [(Lane(*place, row[0]), *row[1:]) for place, own in ctas.items() for row in own]
    spans = empty_spans(len(rows))
    for i, (lane, step, start, end, block) in enumerate(rows):
        for known, name in ((lanes, lane), (steps, step)):
            if name not in known:
                known.append(name)  # type: ignore[arg-type]
        spans["lane"][i], spans["step"][i] = lanes.index(lane), steps.index(step)
        spans["start_ns"][i], spans["end_ns"][i] = start, end
        for field, value in block.items():
            spans[field][i] = value
    lanes, spans = in_order(lanes, spans)
    relate(lanes, steps, spans)
    return Timeline(lanes, steps, spans, series, facts={"chip": "none"})


def small_timeline() -> Timeline:
    """Two CTAs of rank 0: the first one computes a block of Linear1, whose m-block Linear2 of the
    second one waits for. And one of rank 1, with nothing to do."""
    pool, other = {"m_block": 3, "rows": 8}, {"m_block": 3, "rows": 8}
    first, second = ({"expert": e, "n_block": n, "rows": 8} for e, n in ((1, 0), (1, 5)))
    ctas: dict[tuple[int, int], list[Row]] = {
        (0, 0): [
            ("dispatch", "pull", 0, 400, {}),
            ("dispatch", "wait for this CTA's blocks", 400, 3000, {}),
            ("activation loader", "wait for Linear1 tokens", 0, 450, pool),
            ("activation loader", "load Linear1", 450, 1000, {}),
            ("weight loader", "load Linear1", 100, 1200, first),
            ("math", "wait for a block", 0, 500, {}),
            ("math", "Linear1 main loop", 500, 1500, first),
            ("math", "Linear1 epilogue", 1500, 2000, {}),
            ("math", "wait for a block", 2000, 3000, {}),
        ],
        (0, 1): [
            ("activation loader", "wait for Linear2 tokens", 100, 2050, other),
            ("activation loader", "load Linear2", 2050, 2400, {}),
            ("weight loader", "load Linear2", 150, 2400, second),
            ("math", "wait for a block", 0, 2100, {}),
            ("math", "Linear2 main loop", 2100, 2700, second),
            ("math", "Linear2 epilogue", 2700, 3000, {}),
            ("dispatch", "rank barrier before combine", 3000, 4000, {}),
            ("combine", "wait for combine", 3000, 4010, {}),
        ],
        (1, 0): [
            ("dispatch", "count tokens", 0, 3900, {}),
            ("dispatch", "rank barrier before combine", 3900, 4000, {}),
        ],
    }
    shares = np.array([0.0, 1.0, 0.5, 0.25])
    return timeline_of_rows(ctas, (Series(0, "memory", 0.0, 1000.0, shares, 3000.0, "GB/s"),))


def index_of(timeline: Timeline, rank: int, cta: int, role: str, step: str, which: int = 0) -> int:
    """Of a span."""
    lane = timeline.lanes.index(Lane(rank, cta, role))
    at = timeline.steps.index(step)
    found = np.flatnonzero((timeline.spans["lane"] == lane) & (timeline.spans["step"] == at))
    return int(found[which])


def large_timeline(num_spans: int, num_ctas: int = 132) -> Timeline:
    """A call of 8 ms on that many SMs; blocks of 48 experts."""
    per_lane = num_spans // num_ctas // 2
    lanes, parts = [], []
    generator = np.random.default_rng(0)
    for cta in range(num_ctas):
        for role, first in (("weight loader", 0), ("math", 1)):
            spans = empty_spans(per_lane)
            edges = np.sort(generator.uniform(0, 8e6, per_lane + 1))
            spans["lane"], spans["start_ns"], spans["end_ns"] = len(lanes), edges[:-1], edges[1:]
            spans["step"] = first + np.arange(per_lane) % (1 + 2 * first)
            spans["expert"] = np.where(spans["step"] == 3, -1, np.arange(per_lane) // 64 % 48)
            spans["n_block"], spans["m_block"] = np.arange(per_lane) % 16, cta
            lanes.append(Lane(0, cta, role))
            parts.append(spans)
    steps = ["load Linear1", "Linear1 main loop", "Linear1 epilogue", "wait for a block"]
    shares = np.abs(np.sin(np.arange(4000) / 50))
    series = [Series(0, name, 0.0, 2000.0, shares) for name in ("memory", "L2")]
    return Timeline(lanes, steps, np.concatenate(parts), series)
