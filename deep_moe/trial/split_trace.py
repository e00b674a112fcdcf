"""Where the time of a call by the throughput path goes: the phases of its dispatch and combine, and
the steps of its experts between them, on one clock for each rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deep_moe.split.profile import PhaseOfCta
from deep_moe.split.throughput import AllToAll
from deep_moe.traces.chrome import complete_event, process_name, thread_name, write_events
from deep_moe.traces.related import relate
from deep_moe.traces.timeline import Lane, Timeline, empty_spans, in_order

from .trace import RankTrace, Recorder, chrome_events
from .trace.timeline import rank_spans, step_names


@dataclass(frozen=True)
class SplitTrace:
    """Of one rank and call. Nanoseconds from the begin of its dispatch; in the emulator a
    nanosecond is a warp instruction, and the kernels stand one behind the other."""

    rank: int
    dispatch: list[PhaseOfCta]
    experts: RankTrace
    combine: list[PhaseOfCta]


def newest_call(all_to_all: AllToAll, recorder: Recorder) -> SplitTrace:
    """The last call of a layer with enable_profiling=True, whose experts are recorded by
    `recorder`; waits for it."""
    dispatch_begin_ns, dispatch = all_to_all.newest_phases("dispatch")
    combine_begin_ns, combine = all_to_all.newest_phases("combine")
    experts = replace(recorder.collect(), rank=all_to_all.rank)  # a work space knows no ranks
    if experts.is_emulated:
        to_experts_ns = to_combine_ns = max(phase.end_ns for phase in dispatch)
        if len(experts.spans):
            to_combine_ns += float(experts.spans["end_ns"].max())
    else:
        to_experts_ns = float(recorder.begin_ns - dispatch_begin_ns)
        to_combine_ns = float(combine_begin_ns - dispatch_begin_ns)
    combine = [
        replace(phase, start_ns=phase.start_ns + to_combine_ns, end_ns=phase.end_ns + to_combine_ns)
        for phase in combine
    ]
    return SplitTrace(all_to_all.rank, dispatch, experts.shifted(to_experts_ns), combine)


def summary(traces: Sequence[SplitTrace]) -> dict[str, Any]:
    """Of each kernel, from its first stamp to its last on the slowest rank, and
    what a CTA spent in each phase of the all-to-all, the mean of all CTAs of all ranks.
    In microseconds, and of the emulator in thousands of warp instructions."""
    kernels: dict[str, float] = {}
    phases: dict[str, list[float]] = {}
    for trace in traces:
        spans = {"dispatch": _ends(trace.dispatch), "combine": _ends(trace.combine)}
        if len(trace.experts.spans):
            first, last = trace.experts.spans["start_ns"].min(), trace.experts.spans["end_ns"].max()
            spans["experts"] = float(first), float(last)
        for name, (start_ns, end_ns) in spans.items():
            kernels[name] = max(kernels.get(name, 0.0), (end_ns - start_ns) / 1e3)
        for phase in (*trace.dispatch, *trace.combine):
            phases.setdefault(phase.phase, []).append((phase.end_ns - phase.start_ns) / 1e3)
    return {
        "kernels": {name: kernels.get(name, 0.0) for name in ("dispatch", "experts", "combine")},
        "phases": {name: statistics.fmean(found) for name, found in phases.items()},
        "num_lost": sum(trace.experts.num_lost for trace in traces),
    }


def write_split_trace(traces: Sequence[SplitTrace], path: str | Path, *, unit: str = "us") -> None:
    """For chrome://tracing and ui.perfetto.dev; compressed if the name ends in .gz. Each rank is
    two processes: its experts, whose threads are tracks of CTAs, and its all-to-all, whose threads
    are CTAs."""
    write_events(
        (event for trace in traces for event in _events(trace, len(traces))), path, unit=unit
    )


def split_timeline(
    traces: Sequence[SplitTrace], *, unit: str = "us", facts: Mapping[str, str] | None = None
) -> Timeline:
    """The same for a page: beside the roles of a CTA the phases of the all-to-all.

    Args:
        traces: of all ranks.
        unit: of 1000 ns.
        facts: what else is said of the call, by name.
    """
    names = step_names()
    lanes: list[Lane] = []
    parts = []
    for trace in traces:
        own, spans = rank_spans(trace.experts)
        spans["lane"] += len(lanes)
        lanes += own
        parts.append(spans)
        phases = [*trace.dispatch, *trace.combine]
        spans = empty_spans(len(phases))
        for i, phase in enumerate(phases):
            lane = Lane(trace.rank, phase.cta, "all-to-all")
            if lane not in lanes:
                lanes.append(lane)
            if phase.phase not in names:
                names.append(phase.phase)
            spans["lane"][i], spans["step"][i] = lanes.index(lane), names.index(phase.phase)
            spans["start_ns"][i], spans["end_ns"][i] = phase.start_ns, phase.end_ns
        parts.append(spans)
    lanes, spans = in_order(lanes, np.concatenate(parts))
    relate(lanes, names, spans)
    return Timeline(lanes, names, spans, (), unit, facts=facts or {})


def _events(trace: SplitTrace, num_ranks: int) -> Iterator[str]:
    yield from chrome_events(trace.experts)
    pid = num_ranks + trace.rank
    yield process_name(pid, f"rank {trace.rank}, all-to-all")
    both = [*trace.dispatch, *trace.combine]
    for cta in sorted({phase.cta for phase in both}):
        yield from thread_name(pid, cta, f"CTA {cta}")
    for phase in both:
        yield complete_event(phase.phase, pid, phase.cta, phase.start_ns, phase.end_ns, {})


def _ends(phases: Sequence[PhaseOfCta]) -> tuple[float, float]:
    return min(phase.start_ns for phase in phases), max(phase.end_ns for phase in phases)
