"""Where the time of a call goes: moments, what each role spends on each step, blocks per CTA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .names import numbers, steps, tracks
from .rank_trace import RankTrace, alignment_error_ns


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
    blocks = spans[np.isin(spans["step"], numbers("l1_main_loop", "l2_main_loop"))]
    l1 = rank.select(step="l1_epilogue")
    epilogues = spans[np.isin(spans["step"], numbers("l1_epilogue", "l2_epilogue"))]
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
    of_one_cta = numbers("publish_counts", "clean_up", "rank_barrier_after_cleanup")
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
        if step in numbers("l1_main_loop", "l2_main_loop"):
            waited_us = float(_stage_wait_ns(spans)[chosen].sum()) / 1e3
            sums[f"{text[step]}, of it waiting for stages"] = waited_us / num_ctas
    return sums


def _stage_wait_ns(spans: np.ndarray) -> np.ndarray:
    """Of each main loop of a track; the wait for a block that comes next says it. Else 0."""
    waits = np.zeros(len(spans))
    is_loop = np.isin(spans["step"], numbers("l1_main_loop", "l2_main_loop"))
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
        np.isin(following, numbers(f"{phase}_main_loop", f"{phase}_epilogue"))
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
