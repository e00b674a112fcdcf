"""Files for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from .timeline import Series


def write_events(events: Iterable[str], path: str | Path, *, unit: str = "us") -> None:
    """A trace of these events; compressed if the name ends in .gz. unit: of 1000 ns, for
    `read_trace`."""
    head = f'{{"displayTimeUnit":"ns","otherData":{{"unit":"{unit}"}},"traceEvents":[\n'
    text = head + ",\n".join(events) + "\n]}\n"
    if str(path).endswith(".gz"):
        with gzip.open(path, "wt", compresslevel=6, encoding="utf-8") as file:
            file.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def process_name(pid: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})


def thread_name(pid: int, tid: int, name: str) -> Iterator[str]:
    """Threads stand in the order of their numbers."""
    for kind, value in (
        ("thread_name", {"name": name}),
        ("thread_sort_index", {"sort_index": tid}),
    ):
        yield json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": value})


def complete_event(
    name: str, pid: int, tid: int, start_ns: float, end_ns: float, arguments: dict[str, float]
) -> str:
    """Complete event; names hold nothing that JSON would have to escape."""
    words = ",".join(f'"{key}":{value:g}' for key, value in arguments.items())
    return (
        f'{{"ph":"X","name":"{name}","pid":{pid},"tid":{tid},"ts":{start_ns / 1e3:.3f},'
        f'"dur":{(end_ns - start_ns) / 1e3:.3f},"args":{{{words}}}}}'
    )


def counter_events(series: Series) -> Iterator[str]:
    """How busy a unit was, in percent."""
    for i, share in enumerate(series.shares.tolist()):
        ts = (series.start_ns + i * series.step_ns) / 1e3
        yield (
            f'{{"ph":"C","name":"{series.name}","pid":{series.rank},"ts":{ts:.3f},'
            f'"args":{{"percent":{100 * share:.1f}}}}}'
        )
