"""Recorded calls as a page shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deep_moe.emulator import Chip, GpuUsage
from deep_moe.traces.machine import unit_series
from deep_moe.traces.related import relate
from deep_moe.traces.timeline import Lane, Series, Timeline, empty_spans, in_order

from .names import numbers, steps, tracks
from .rank_trace import RankTrace


def timeline_of(
    ranks: Sequence[RankTrace],
    *,
    unit: str = "us",
    usage: Sequence[Series] = (),
    facts: Mapping[str, str] | None = None,
) -> Timeline:
    """Aligned ranks.

    Args:
        ranks: of one call, see `aligned`.
        unit: of 1000 ns.
        usage: how busy units were, see `usage_series`.
        facts: what else is said of the call, by name.
    """
    lanes: list[Lane] = []
    parts = []
    for rank in ranks:
        own, spans = rank_spans(rank)
        spans["lane"] += len(lanes)
        lanes += own
        parts.append(spans)
    lanes, spans = in_order(lanes, np.concatenate(parts))
    names = step_names()
    relate(lanes, names, spans)
    return Timeline(lanes, names, spans, usage, unit, facts=facts or {})


def step_names() -> list[str]:
    """By the numbers that records have."""
    return [steps().text[number] for number in range(len(steps().text))]


def rank_spans(rank: RankTrace) -> tuple[list[Lane], np.ndarray]:
    """One rank's lanes and spans, with what each says of its block."""
    pairs, lane = np.unique(rank.spans[["cta", "track"]], return_inverse=True)
    lanes = [Lane(rank.rank, cta, tracks().text[track]) for cta, track in pairs.tolist()]
    spans = empty_spans(len(rank.spans))
    spans["lane"] = lane
    for name in ("step", "start_ns", "end_ns"):
        spans[name] = rank.spans[name]
    step, detail, rows = (rank.spans[name] for name in ("step", "detail", "num_rows"))
    awaits_tokens = np.isin(step, numbers("await_l1_tokens", "await_l2_tokens"))
    spans["m_block"][awaits_tokens] = detail[awaits_tokens]
    spans["rows"][awaits_tokens] = rows[awaits_tokens]
    for phase, num_n_blocks in zip(("l1", "l2"), rank.num_n_blocks, strict=True):
        named = numbers(f"load_{phase}", f"{phase}_main_loop", f"{phase}_epilogue")
        chosen = np.isin(step, named) & (rows > 0)
        spans["rows"][chosen] = rows[chosen]
        spans["expert"][chosen], spans["n_block"][chosen] = np.divmod(detail[chosen], num_n_blocks)
    return lanes, spans


def usage_series(usage: Sequence[GpuUsage], ranks: Sequence[RankTrace], chip: Chip) -> list[Series]:
    """How busy units were, on the clock of aligned ranks, which a chip's clock timed. Units that
    did nothing are left out."""
    traced = {rank.rank: rank for rank in ranks}
    series = []
    for gpu in usage:
        rank = traced.get(gpu.rank)
        if rank is not None:
            start_ns = rank.shift_ns + (gpu.begin_ns - rank.begin_ns)
            series += unit_series(gpu, chip, start_ns)
    return series
