"""Reads traces in Chrome's format, above all those that deep_moe wrote, for a page."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .related import relate
from .timeline import NONE, Lane, Series, Timeline, empty_spans, in_order

_RANK = re.compile(r"rank (\d+)")
_CTA = re.compile(r"CTA (\d+) ?(.*)")
# Around a main loop and its epilogue, for viewers that nest; the two say it themselves.
_BLOCK = re.compile(r"Linear[12] expert \d+ n \d+")
_FIELDS = {"expert": "expert", "n-block": "n_block", "rows": "rows", "pool block": "m_block"}


def read_trace(path: str | Path) -> Timeline:
    """A trace as a page shows it. Of other programs' traces the complete events ("X") and the
    counters ("C") are taken.

    Args:
        path: of a JSON file, compressed if its name ends in .gz. ValueError if it is no trace.
    """
    document = _read(Path(path))
    events = document["traceEvents"]
    other = document.get("otherData")
    unit = other.get("unit", "us") if isinstance(other, dict) else "us"
    try:
        lanes, steps, spans = _spans(events)
        series = _series(events)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: an event is not as Chrome's format has it: {error!r}") from None
    if not len(spans):
        raise ValueError(f'{path} holds no complete events ("ph": "X"): nothing to show')
    lanes, spans = in_order(lanes, spans)
    relate(lanes, steps, spans)
    return Timeline(lanes, steps, spans, series, str(unit))


def _read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    try:
        if path.name.endswith(".gz"):
            raw = gzip.decompress(raw)
        document = json.loads(raw)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} must be a trace in Chrome's JSON format: {error}") from None
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f'{path} must have a list "traceEvents"')
    return document


def _names(events: Sequence[Mapping[str, Any]], kind: str) -> dict[tuple[Any, ...], str]:
    """Names of processes by (pid,), or of threads by (pid, tid)."""
    keys = ("pid",) if kind == "process_name" else ("pid", "tid")
    return {
        tuple(event.get(key) for key in keys): str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == kind
    }


def _spans(events: Sequence[Mapping[str, Any]]) -> tuple[list[Lane], list[str], np.ndarray]:
    processes, threads = (_names(events, kind) for kind in ("process_name", "thread_name"))
    lanes: dict[Lane, int] = {}
    steps: dict[str, int] = {}
    chosen = [
        event
        for event in events
        if event.get("ph") == "X" and not _BLOCK.fullmatch(str(event["name"]))
    ]
    spans = empty_spans(len(chosen))
    of_thread: dict[tuple[Any, Any], int] = {}
    pids = {pid: index for index, pid in enumerate(dict.fromkeys(e.get("pid") for e in chosen))}
    for i, event in enumerate(chosen):
        key = event.get("pid"), event.get("tid")
        if key not in of_thread:
            process = processes.get(key[:1], "")
            lane = _lane(process, threads.get(key, f"thread {key[1]}"), pids[key[0]])
            of_thread[key] = lanes.setdefault(lane, len(lanes))
        begin_us, length_us = float(event["ts"]), float(event.get("dur", 0))
        arguments = event.get("args") or {}
        numbers = [arguments.get(name, NONE) for name in _FIELDS]
        spans[i] = (
            of_thread[key],
            steps.setdefault(str(event["name"]), len(steps)),
            1e3 * begin_us,
            1e3 * (begin_us + length_us),
            *(int(numbers[k]) for k in (0, 3, 1, 2)),
            NONE,
        )
    if len(spans):  # other programs count from anywhere
        first = spans["start_ns"].min()
        if first < 0 or first > 1e9:
            spans["start_ns"] -= first
            spans["end_ns"] -= first
    return list(lanes), list(steps), spans


def _lane(process: str, thread: str, pid: int) -> Lane:
    rank, cta = _RANK.match(process), _CTA.fullmatch(thread)
    number = int(rank[1]) if rank else pid
    if cta is None:
        return Lane(number, 0, thread)
    role = "all-to-all" if "all-to-all" in process else cta[2]
    return Lane(number, int(cta[1]), role)


def _series(events: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Counters of shares, in equal steps, as `counter_events` writes them."""
    values: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in events:
        if event.get("ph") == "C" and "percent" in event.get("args", {}):
            own = values.setdefault((int(event["pid"]), str(event["name"])), [])
            own.append((1e3 * float(event["ts"]), float(event["args"]["percent"]) / 100))
    series = []
    for (rank, name), points in values.items():
        times, shares = np.array(sorted(points)).T
        if len(times) > 1:
            step_ns = float(times[-1] - times[0]) / (len(times) - 1)
            series.append(Series(rank, name, float(times[0]), step_ns, shares))
    return series
