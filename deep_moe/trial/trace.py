"""What every warp of a call did and when, from time stamps that the kernel itself takes.

    with trace.record(buffer) as (recorder,):
        deep_moe.fp8_fp4_mega_moe(y, l1, l2, buffer)
    ranks = trace.aligned([recorder.collect()])
    trace.write_chrome_trace(ranks, "layer.json.gz")     # chrome://tracing, ui.perfetto.dev
    print(trace.table({"this call": trace.breakdown(ranks)}))

Inside `record` calls run a kernel of their own, compiled with `Config::trace`; include/deep_moe/
trace/tracer.cuh says what it stores. With several processes each records its own rank, and one gets
what the others collected.

Stamps are counts of an SM's clock. A straight line for each CTA, through pairs of both clocks taken
at its begin and end, turns them into nanoseconds of the GPU's global clock, and the moment at which
ranks leave the barrier before combine brings the clocks of several GPUs together. In the emulator
a nanosecond is a warp instruction, of whichever warp, and all ranks share the clock.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from deep_moe.jit.headers import library_path
from deep_moe.jit.kernel_args import TraceCta, TraceRecord
from deep_moe.traces.chrome import complete_event, process_name, thread_name, write_events
from deep_moe.traces.clock import TraceClock

if TYPE_CHECKING:
    from deep_moe.targets.config import MegaMoEConfig

DEFAULT_CAPACITY = 2048  # records per track; three for each block that a CTA computes
_HEADER = "deep_moe/trace/tracer.cuh"
_CTA_DTYPE = np.dtype(TraceCta)
_RECORD_DTYPE = np.dtype(TraceRecord)
_SPAN_DTYPE = np.dtype(
    [
        ("cta", np.int32),
        ("track", np.int16),
        ("step", np.int16),
        ("start_ns", np.float64),
        ("end_ns", np.float64),
        ("num_rows", np.int32),
        ("detail", np.int64),
    ]
)


@dataclass(frozen=True)
class Names:
    """The enumerators of an enum in the header: C++ name -> number, number -> words."""

    number: Mapping[str, int]
    text: Mapping[int, str]


@lru_cache(maxsize=2)
def _names(enum: str) -> Names:
    source = (library_path() / _HEADER).read_text()
    body = re.search(rf"enum class {enum}\b[^{{]*\{{(.*?)\}};", source, re.DOTALL)
    if body is None:
        raise ValueError(f"{_HEADER} declares no enum class {enum}")
    entries = re.findall(r"^\s*(\w+) = (\d+),\s*// (.+)$", body.group(1), re.MULTILINE)
    return Names(
        {name: int(number) for name, number, _ in entries},
        {int(number): text for _, number, text in entries},
    )


def steps() -> Names:
    """What a warp can be at."""
    return _names("TraceStep")


def tracks() -> Names:
    """The warps of a CTA that record."""
    return _names("TraceTrack")


@dataclass(frozen=True)
class RankTrace:
    """One rank's part of a call.

    num_n_blocks: numbers of weight blocks per expert that `detail` counts with, for Linear1 and
    Linear2. spans: steps in the order of (cta, track, start_ns); the fields of `_SPAN_DTYPE`.
    `detail` is that of trace/tracer.cuh, in nanoseconds where that counts ticks. clock_error_ns:
    how far the last anchor of the worst CTA is from the line through its first one. sm_clock_mhz:
    ticks per microsecond in the median CTA; in the emulator, where a tick is a nanosecond, 1000.
    num_lost: records that found no room.
    """

    rank: int
    num_n_blocks: tuple[int, int]
    is_emulated: bool
    spans: np.ndarray
    clock_error_ns: float
    sm_clock_mhz: float
    num_lost: int

    def shifted(self, nanoseconds: float) -> RankTrace:
        spans = self.spans.copy()
        spans["start_ns"] += nanoseconds
        spans["end_ns"] += nanoseconds
        return replace(self, spans=spans)

    def select(self, track: str | None = None, step: str | None = None) -> np.ndarray:
        """Spans of a track, or of a step, or of both."""
        chosen = np.ones(len(self.spans), bool)
        if track is not None:
            chosen &= self.spans["track"] == tracks().number[track]
        if step is not None:
            chosen &= self.spans["step"] == steps().number[step]
        return self.spans[chosen]


class TracedBuffer(Protocol):
    """What calls go through that are recorded: a symmetric buffer, or a work space."""

    device: torch.device
    recorder: Recorder | None

    @property
    def rank(self) -> int: ...

    @property
    def is_emulated(self) -> bool: ...

    def raise_if_failed(self) -> None: ...


class Recorder:
    """The trace buffer of one rank. Holds the last call that was made while it was in force."""

    def __init__(self, buffer: TracedBuffer, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 record per track; got {capacity}")
        self.buffer = buffer
        self.capacity = capacity
        self.memory: torch.Tensor | None = None
        self.config: MegaMoEConfig | None = None
        self.begin_ns = 0  # of what was collected, by the GPU's %globaltimer
        self.is_timed = not buffer.is_emulated  # else a nanosecond is an instruction

    def attach(self, config: MegaMoEConfig) -> torch.Tensor:
        """Zeroed memory for a call of this kernel, enqueued on the current stream."""
        num_records = config.num_sms * len(tracks().number) * self.capacity
        num_bytes = config.num_sms * _CTA_DTYPE.itemsize + num_records * _RECORD_DTYPE.itemsize
        if self.memory is None or self.memory.numel() != num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.buffer.device)
        self.config = config
        return self.memory.zero_()

    def collect(self) -> RankTrace:
        """What the last call recorded; waits for it. Raises if the call failed."""
        if self.memory is None or self.config is None:
            raise ValueError("nothing was recorded: no call was made")
        raw = self.memory.cpu().numpy()
        self.buffer.raise_if_failed()
        num_ctas = self.config.num_sms
        num_header_bytes = num_ctas * _CTA_DTYPE.itemsize
        ctas = raw[:num_header_bytes].view(_CTA_DTYPE)
        records = raw[num_header_bytes:].view(_RECORD_DTYPE)
        records = records.reshape(num_ctas, len(tracks().number), self.capacity)
        clock = TraceClock.through(ctas) if self.is_timed else TraceClock.emulated(num_ctas)
        self.begin_ns = int(ctas["first"]["global_ns"].min()) if self.is_timed else 0
        return RankTrace(
            rank=self.buffer.rank,
            num_n_blocks=self.config.num_traced_n_blocks,
            is_emulated=not self.is_timed,
            spans=_spans(records, clock),
            clock_error_ns=clock.error_ns,
            sm_clock_mhz=1e3 / clock.ns_per_tick,
            num_lost=int(ctas["num_lost"].sum()),
        )


@contextlib.contextmanager
def record(*buffers: TracedBuffer, capacity: int = DEFAULT_CAPACITY) -> Iterator[list[Recorder]]:
    """Record the calls with these buffers; `collect` gives the last one of each. A buffer may be
    the work space of `GroupedExperts`."""
    recorders = [Recorder(buffer, capacity) for buffer in buffers]
    for buffer, recorder in zip(buffers, recorders, strict=True):
        if buffer.recorder is not None:
            raise ValueError(f"sym_buffer of rank {buffer.rank} is being recorded already")
        buffer.recorder = recorder
    try:
        yield recorders
    finally:
        for buffer in buffers:
            buffer.recorder = None


def _spans(records: np.ndarray, clock: TraceClock) -> np.ndarray:
    """records: [ctas, tracks, capacity]. A step lasts until the next one of its track."""
    starts = records[..., :-1]
    ends = records[..., 1:]
    step = steps().number
    whole = (starts["step"] != step["none"]) & (ends["step"] != step["none"])
    cta, track, _ = np.nonzero(whole)
    starts, ends = starts[whole], ends[whole]

    def ns(ticks: np.ndarray) -> np.ndarray:
        passed = (ticks - clock.first_ticks[cta]).astype(np.int64)
        return clock.first_ns[cta] + passed * clock.ns_per_tick

    spans = np.empty(len(cta), _SPAN_DTYPE)
    spans["cta"], spans["track"] = cta, track
    for name in ("step", "num_rows", "detail"):
        spans[name] = starts[name]
    spans["start_ns"], spans["end_ns"] = ns(starts["ticks"]), ns(ends["ticks"])
    counts_ticks = spans["step"] == step["await_block"]
    spans["detail"][counts_ticks] = np.round(spans["detail"][counts_ticks] * clock.ns_per_tick)
    return spans


# ---- Several ranks -------------------------------------------------------------------------------

_RANK_BARRIERS = ("rank_barrier_before_combine", "rank_barrier_after_cleanup")
# Steps that a rank leaves as soon as all ranks have come to some point.
_MEETINGS = (*_RANK_BARRIERS, "await_counts")


def aligned(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """All ranks on one clock that starts with the first step of any of them."""
    in_order = sorted(ranks, key=lambda rank: rank.rank)
    if not any(rank.is_emulated for rank in in_order):
        in_order = [rank.shifted(-_meeting_ns(rank, _MEETINGS[0])) for rank in in_order]
    begin_ns = min(float(rank.spans["start_ns"].min()) for rank in in_order)
    return [rank.shifted(-begin_ns) for rank in in_order]


def alignment_error_ns(ranks: Sequence[RankTrace]) -> float:
    """How far apart aligned ranks leave the other meetings, which is as far as the alignment can
    be trusted."""
    spread = 0.0
    for meeting in _MEETINGS[1:]:
        left = [_meeting_ns(rank, meeting) for rank in ranks]
        spread = max(spread, max(left) - min(left))
    return spread


def _meeting_ns(rank: RankTrace, meeting: str) -> float:
    """When a rank, that is the first of its CTAs, leaves a step that waits for all ranks."""
    return float(rank.select("dispatch", meeting)["end_ns"].min())


# ---- Breakdown -----------------------------------------------------------------------------------


def breakdown(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Where the time of aligned ranks went, in microseconds, as JSON takes it.

    timeline: when things happened, on the common clock. tracks: what the mean CTA spent on each
    step. blocks: how many a CTA computed. sm_clock_mhz: see RankTrace. All of them for each of
    `ranks`, and of these the mean and, of `timeline`, the latest, over ranks.
    """
    single = [_rank_breakdown(rank) for rank in ranks]
    timelines = [one["timeline"] for one in single]
    return {
        "timeline": _mean_of(timelines),
        "timeline_latest": {
            name: max(one[name] for one in timelines if name in one) for name in _mean_of(timelines)
        },
        "tracks": {
            track: _mean_of([one["tracks"].get(track, {}) for one in single])
            for track in _in_order(one["tracks"] for one in single)
        },
        "blocks": _mean_of([one["blocks"] for one in single]),
        "clock_error": max(rank.clock_error_ns for rank in ranks) / 1e3,
        "alignment_error": alignment_error_ns(ranks) / 1e3,
        "sm_clock_mhz": float(np.mean([rank.sm_clock_mhz for rank in ranks])),
        "num_lost": sum(rank.num_lost for rank in ranks),
        "ranks": single,
    }


def _rank_breakdown(rank: RankTrace) -> dict[str, Any]:
    by_track = {
        text: sums
        for name, text in ((name, tracks().text[n]) for name, n in tracks().number.items())
        if (sums := _track_sums(rank, name))
    }
    return {
        "timeline": _timeline(rank),
        "tracks": by_track,
        "blocks": _block_counts(rank),
        "sm_clock_mhz": rank.sm_clock_mhz,
    }


def _timeline(rank: RankTrace) -> dict[str, float]:
    spans = rank.spans

    def of_ctas(chosen: np.ndarray, edge: str, pick: str) -> np.ndarray:
        """The first or last such moment of each CTA."""
        order = np.lexsort((chosen[edge], chosen["cta"]))
        ctas = chosen["cta"][order]
        edges = ctas[1:] != ctas[:-1]
        keep = np.r_[True, edges] if pick == "first" else np.r_[edges, True]
        return chosen[edge][order][keep]

    moments: dict[str, float] = {"kernel begins": spans["start_ns"].min()}
    loads = rank.select("activation_loader", "await_l1_tokens")
    pulls = rank.select("dispatch", "pull")
    blocks = spans[np.isin(spans["step"], _numbers("l1_main_loop", "l2_main_loop"))]
    l1 = rank.select(step="l1_epilogue")
    epilogues = spans[np.isin(spans["step"], _numbers("l1_epilogue", "l2_epilogue"))]
    combines = rank.select("combine", "combine")
    if len(pulls):
        moments["counts known, pull begins"] = pulls["start_ns"].mean()
        moments["pull ends, first CTA"] = pulls["end_ns"].min()
        moments["pull ends, last CTA"] = pulls["end_ns"].max()
    if len(loads):
        arrived = of_ctas(loads, "end_ns", "first")
        moments["first tokens there, first CTA"] = arrived.min()
        moments["first tokens there, mean CTA"] = arrived.mean()
    if len(blocks):
        moments["first block begins, mean CTA"] = of_ctas(blocks, "start_ns", "first").mean()
    if len(l1):
        moments["last Linear1 block ends, last CTA"] = l1["end_ns"].max()
    if len(epilogues):
        ends = of_ctas(epilogues, "end_ns", "last")
        moments["last block ends, first CTA"] = ends.min()
        moments["last block ends, mean CTA"] = ends.mean()
        moments["last block ends, last CTA"] = ends.max()
    if len(combines):
        moments["combine begins"] = combines["start_ns"].min()
        moments["combine ends, mean CTA"] = combines["end_ns"].mean()
        moments["combine ends, last CTA"] = combines["end_ns"].max()
    moments["kernel ends"] = spans["end_ns"].max()
    return {name: float(ns) / 1e3 for name, ns in moments.items()}


def _track_sums(rank: RankTrace, track: str) -> dict[str, float]:
    """Time that the mean CTA spends on each step of a track; on what one CTA does for all, that
    one."""
    spans = rank.select(track)
    if not len(spans):
        return {}
    number, text = steps().number, steps().text
    num_ctas = len(np.unique(spans["cta"]))
    duration = (spans["end_ns"] - spans["start_ns"]) / 1e3
    of_one_cta = _numbers("publish_counts", "clean_up", "rank_barrier_after_cleanup")
    sums: dict[str, float] = {}

    def add(name: str, chosen: np.ndarray) -> None:
        if chosen.any():
            sums[name] = float(duration[chosen].sum()) / num_ctas

    for step in dict.fromkeys(spans["step"].tolist()):
        chosen = spans["step"] == step
        if step in of_one_cta:
            sums[text[step]] = float(duration[chosen].sum())
        elif step == number["await_block"]:
            for name, parts in _waits(spans).items():
                add(name, parts)
        else:
            add(text[step], chosen)
        if step in _numbers("l1_main_loop", "l2_main_loop"):
            waited_us = float(_stage_wait_ns(spans)[chosen].sum()) / 1e3
            sums[f"{text[step]}, of it waiting for stages"] = waited_us / num_ctas
    return sums


def _stage_wait_ns(spans: np.ndarray) -> np.ndarray:
    """Of each main loop of a track; the wait for a block that comes next says it. Else 0."""
    waits = np.zeros(len(spans))
    is_loop = np.isin(spans["step"], _numbers("l1_main_loop", "l2_main_loop"))
    awaits = np.flatnonzero(spans["step"] == steps().number["await_block"])
    loops = np.flatnonzero(is_loop)
    following = np.searchsorted(awaits, loops)
    # Not there if the records behind the loop are lost.
    found = following < len(awaits)
    loops, awaits = loops[found], awaits[following[found]]
    same_cta = spans["cta"][loops] == spans["cta"][awaits]
    waits[loops[same_cta]] = spans["detail"][awaits[same_cta]]
    return waits


def _waits(spans: np.ndarray) -> dict[str, np.ndarray]:
    """The waits for a block of one track: which are for the first, and for which phase."""
    number = steps().number
    awaits = spans["step"] == number["await_block"]
    is_first = np.r_[True, spans["cta"][1:] != spans["cta"][:-1]]
    # What follows in the same CTA; nothing follows the last one.
    following = np.r_[np.where(is_first[1:], -1, spans["step"][1:]), -1]
    l1, l2 = (
        np.isin(following, _numbers(f"{phase}_main_loop", f"{phase}_epilogue"))
        for phase in ("l1", "l2")
    )
    return {
        "wait for the first block": awaits & is_first,
        "wait for a Linear1 block": awaits & ~is_first & l1,
        "wait for a Linear2 block": awaits & ~is_first & l2,
        "wait for the end of the list": awaits & ~is_first & (following == -1),
    }


def _block_counts(rank: RankTrace) -> dict[str, float]:
    """Blocks per CTA: least, mean, most."""
    counts: dict[str, float] = {}
    ctas = np.unique(rank.spans["cta"])
    for phase in ("l1", "l2"):
        chosen = rank.select(step=f"{phase}_epilogue")
        own = np.array([(chosen["cta"] == cta).sum() for cta in ctas])
        name = phase.replace("l", "Linear")
        counts |= {
            f"{name}, least": float(own.min()),
            f"{name}, mean": float(own.mean()),
            f"{name}, most": float(own.max()),
        }
    return counts


def _numbers(*names: str) -> list[int]:
    return [steps().number[name] for name in names]


def _in_order(mappings: Any) -> list[str]:
    """All keys, in the order in which they appear first."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each entry, over those that have it."""
    return {
        name: float(np.mean([row[name] for row in rows if name in row])) for name in _in_order(rows)
    }


def table(breakdowns: Mapping[str, Mapping[str, Any]], *, unit: str = "microseconds") -> str:
    """Breakdowns side by side, one column each: means over ranks and CTAs. unit: of all durations;
    on a GPU it is a time."""
    sections: dict[str, list[Mapping[str, float]]] = {
        "when (mean over ranks)": [one["timeline"] for one in breakdowns.values()],
        "when (latest rank)": [
            {
                name: one["timeline_latest"][name]
                for name in ("last block ends, last CTA", "kernel ends")
                if name in one["timeline_latest"]
            }
            for one in breakdowns.values()
        ],
    }
    for track in _in_order(one["tracks"] for one in breakdowns.values()):
        sections[f"{track}: time of the mean CTA"] = [
            one["tracks"].get(track, {}) for one in breakdowns.values()
        ]
    sections["blocks per CTA"] = [one["blocks"] for one in breakdowns.values()]
    sections["trace"] = [
        {
            "error of an SM's clock": one["clock_error"],
            "error between ranks": one["alignment_error"],
            "SM clock, MHz": one["sm_clock_mhz"],
            "records lost": one["num_lost"],
        }
        for one in breakdowns.values()
    ]
    lines = [f"{unit:48s}" + "".join(f"{label:>10s}" for label in breakdowns)]
    for title, columns in sections.items():
        lines.append(title)
        for name in _in_order(columns):
            cells = (f"{one[name]:10.1f}" if name in one else f"{'-':>10s}" for one in columns)
            lines.append(f"  {name:46s}" + "".join(cells))
    return "\n".join(lines)


# ---- Chrome trace --------------------------------------------------------------------------------


def write_chrome_trace(ranks: Sequence[RankTrace], path: str | Path) -> None:
    """Aligned ranks as a trace for chrome://tracing and ui.perfetto.dev; compressed if the name
    ends in .gz. A process is a rank, a thread a track of a CTA."""
    events = [event for rank in ranks for event in chrome_events(rank)]
    write_events(events, path)


def chrome_events(rank: RankTrace) -> Iterator[str]:
    """One rank's."""
    pid = rank.rank
    num_tracks = len(tracks().number)
    yield process_name(pid, f"rank {pid}")
    pairs = np.unique(rank.spans[["cta", "track"]])
    for cta, track in pairs.tolist():
        tid = cta * num_tracks + track
        name = f"CTA {cta} {tracks().text[track]}"
        yield from thread_name(pid, tid, name)
    yield from _block_events(rank)
    for cta, track, step, start, end, num_rows, detail in rank.spans.tolist():
        yield complete_event(
            steps().text[step],
            pid,
            cta * num_tracks + track,
            start,
            end,
            _arguments(rank, step, num_rows, detail),
        )


def _block_events(rank: RankTrace) -> Iterator[str]:
    """Around a main loop and the epilogue behind it, the block as a whole."""
    num_tracks = len(tracks().number)
    loops = _numbers("l1_main_loop", "l2_main_loop")
    epilogues = _numbers("l1_epilogue", "l2_epilogue")
    spans = rank.select("math").tolist()
    for loop, epilogue in itertools.pairwise(spans):
        if loop[2] not in loops or epilogue[2] not in epilogues:
            continue
        phase = loops.index(loop[2])
        expert, n_block = divmod(loop[6], rank.num_n_blocks[phase])
        name = f"Linear{phase + 1} expert {expert} n {n_block}"
        yield complete_event(
            name, rank.rank, loop[0] * num_tracks + loop[1], loop[3], epilogue[4], {}
        )


def _arguments(rank: RankTrace, step: int, num_rows: int, detail: int) -> dict[str, float]:
    number = steps().number
    if step == number["await_block"]:
        return {"main loop before waited us": detail / 1e3} if detail else {}
    if step in _numbers("await_l1_tokens", "await_l2_tokens"):
        return {"pool block": detail, "rows": num_rows}
    if num_rows == 0:
        return {}
    is_linear1 = step in _numbers("load_l1", "l1_main_loop", "l1_epilogue")
    expert, n_block = divmod(detail, rank.num_n_blocks[0 if is_linear1 else 1])
    return {"expert": expert, "n-block": n_block, "rows": num_rows}
