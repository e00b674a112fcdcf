"""Recorded calls as traces for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from deep_moe.traces.chrome import (
    complete_event,
    counter_events,
    process_name,
    thread_name,
    write_events,
)
from deep_moe.traces.timeline import Series

from .names import numbers, steps, tracks
from .rank_trace import RankTrace


def write_chrome_trace(
    ranks: Sequence[RankTrace],
    path: str | Path,
    *,
    unit: str = "us",
    usage: Sequence[Series] = (),
) -> None:
    """Aligned ranks as a trace for chrome://tracing and ui.perfetto.dev; compressed if the name
    ends in .gz. A process is a rank, a thread a track of a CTA.

    Args:
        ranks: of one call, see `aligned`.
        path: of the file.
        unit: of 1000 ns, for those who read the file again.
        usage: how busy units were, see `usage_series`; counters in the file.
    """
    events = [event for rank in ranks for event in chrome_events(rank)]
    events += [event for series in usage for event in counter_events(series)]
    write_events(events, path, unit=unit)


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
    loops = numbers("l1_main_loop", "l2_main_loop")
    epilogues = numbers("l1_epilogue", "l2_epilogue")
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
    if step in numbers("await_l1_tokens", "await_l2_tokens"):
        return {"pool block": detail, "rows": num_rows}
    if num_rows == 0:
        return {}
    is_linear1 = step in numbers("load_l1", "l1_main_loop", "l1_epilogue")
    expert, n_block = divmod(detail, rank.num_n_blocks[0 if is_linear1 else 1])
    return {"expert": expert, "n-block": n_block, "rows": num_rows}
