"""What the emulator's clock records, as a page shows it: how busy units were, and what the warps of
any kernel waited for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deep_moe.emulator import Chip, GpuUsage, Machine

from .timeline import Lane, Series, Timeline, empty_spans, in_order

_RUNS = "instructions"
_MOST = {  # what a share of 1 is, by a chip's parameter
    "memory": ("hbm_gb_per_s", "GB/s"),
    "L2": ("l2_gb_per_s", "GB/s"),
    "links in": ("link_gb_per_s", "GB/s"),
    "links out": ("link_gb_per_s", "GB/s"),
}


def unit_series(usage: GpuUsage, chip: Chip, start_ns: float = 0.0) -> list[Series]:
    """How busy the units of a GPU were. Units that did nothing are left out.

    Args:
        usage: of the GPU.
        chip: whose clock it was.
        start_ns: when the run began, on the timeline's clock.
    """
    series = []
    for name, unit in usage.units.items():
        if not any(unit.shares):
            continue
        most, of = 100.0, "%"
        if name in _MOST:
            parameter, of = _MOST[name]
            most = chip.value(parameter)
        shares = np.array(unit.shares)
        series.append(Series(usage.rank, name, start_ns, unit.step_ns, shares, most, of))
    return series


def machine_timeline(machine: Machine, *, facts: Mapping[str, str] | None = None) -> Timeline:
    """The last run of a machine, of any kernel: a lane for each warp, with its waits and, between
    them, its instructions.

    Args:
        machine: with a chip as clock and keep_waits=True. ValueError if no warp has waited.
        facts: what else is said of the run, by name.
    """
    if machine.chip is None or not machine.waits:
        raise ValueError(
            "the machine has kept no waits: it must have a chip as clock and keep_waits=True, and "
            "have run"
        )
    launches = machine.launch_times
    numbers = {wait.launch for wait in machine.waits}
    lanes: dict[Lane, int] = {}
    kinds: dict[str, int] = {_RUNS: 0}
    rows: list[tuple[int, int, float, float]] = []
    ends: dict[int, float] = {}
    for wait in machine.waits:
        role = f"warp {wait.warp}"
        if len(numbers) > 1:
            role = f"launch {wait.launch} {role}"
        rank = launches[0].rank if len(numbers) == 1 else 0
        lane = lanes.setdefault(Lane(rank, wait.cta, role), len(lanes))
        if wait.start_ns > ends.get(lane, wait.start_ns):
            rows.append((lane, kinds[_RUNS], ends[lane], wait.start_ns))
        kind = kinds.setdefault(wait.kind, len(kinds))
        rows.append((lane, kind, wait.start_ns, wait.end_ns))
        ends[lane] = wait.end_ns
    spans = empty_spans(len(rows))
    for name, column in zip(("lane", "step", "start_ns", "end_ns"), np.array(rows).T, strict=True):
        spans[name] = column
    by_warp = sorted(lanes, key=lambda lane: (lane.rank, lane.cta, len(lane.role), lane.role))
    place = np.empty(len(lanes), np.int32)
    place[[lanes[lane] for lane in by_warp]] = np.arange(len(lanes))
    spans["lane"] = place[spans["lane"]]
    ordered, spans = in_order(by_warp, spans)
    series = [one for gpu in machine.usage for one in unit_series(gpu, machine.chip)]
    said = {"chip": machine.chip.name, **(facts or {})}
    return Timeline(ordered, list(kinds), spans, series, place="CTA", facts=said)
