"""What one rank recorded of a call, and several ranks on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .names import steps, tracks

SPAN_DTYPE = np.dtype(
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
class RankTrace:
    """One rank's part of a call.

    num_n_blocks: numbers of weight blocks per expert that `detail` counts with, for Linear1 and
    Linear2. spans: steps in the order of (cta, track, start_ns); the fields of `SPAN_DTYPE`.
    `detail` is that of trace/tracer.cuh, in nanoseconds where that counts ticks. clock_error_ns:
    how far the last anchor of the worst CTA is from the line through its first one. sm_clock_mhz:
    ticks per microsecond in the median CTA; in the emulator, where a tick is a nanosecond, 1000.
    num_lost: records that found no room. begin_ns: what the GPU's %globaltimer said at 0 of the
    spans' times, before they were shifted by shift_ns in all.
    """

    rank: int
    num_n_blocks: tuple[int, int]
    is_emulated: bool
    spans: np.ndarray
    clock_error_ns: float
    sm_clock_mhz: float
    num_lost: int
    begin_ns: int = 0
    shift_ns: float = 0.0

    def shifted(self, nanoseconds: float) -> RankTrace:
        spans = self.spans.copy()
        spans["start_ns"] += nanoseconds
        spans["end_ns"] += nanoseconds
        return replace(self, spans=spans, shift_ns=self.shift_ns + nanoseconds)

    def select(self, track: str | None = None, step: str | None = None) -> np.ndarray:
        """Spans of a track, or of a step, or of both."""
        chosen = np.ones(len(self.spans), bool)
        if track is not None:
            chosen &= self.spans["track"] == tracks().number[track]
        if step is not None:
            chosen &= self.spans["step"] == steps().number[step]
        return self.spans[chosen]


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
