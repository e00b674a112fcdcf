"""Times that others published for the layers that are timed here, and what is asked of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deep_moe.heuristics import PRESETS

FILE = Path(__file__).parent / "published.json"
PEER_HERE = "sgl-deep-gemm, this run"


@dataclass(frozen=True)
class Figures:
    """One curve: microseconds of a call by tokens per rank, and where it is from."""

    name: str
    model: str
    gpu: str
    num_ranks: int
    formats: str
    source: str
    us: Mapping[int, float]


@dataclass(frozen=True)
class Asked:
    """What is asked of our layer on a machine: `times` as fast as the best peer by tokens per
    rank (first, last, times). model: as results name it."""

    gpu: str
    num_ranks: int
    model: str
    times: tuple[tuple[int, int, float], ...]

    def times_at(self, num_tokens: int) -> float | None:
        """At one number of tokens; None between the ranges that are named."""
        return next(
            (times for first, last, times in self.times if first <= num_tokens <= last), None
        )


def figures(model: str, gpu: str, num_ranks: int) -> list[Figures]:
    """What was published for a model on such a machine."""
    return [
        curve
        for curve in _read()[0]
        if (curve.model, curve.gpu, curve.num_ranks) == (model, gpu, num_ranks)
    ]


def asked(model: str, gpu: str, num_ranks: int) -> Asked | None:
    """What is asked of a model on such a machine."""
    return next(
        (
            goal
            for goal in _read()[1]
            if (goal.model, goal.gpu, goal.num_ranks) == (model, gpu, num_ranks)
        ),
        None,
    )


def is_even(result: Mapping[str, Any]) -> bool:
    """Whether a result is of uniform routing and equal tokens."""
    counts = result.get("tokens_of_ranks", [result["tokens_per_rank"]])
    return result.get("routing", "uniform") == "uniform" and set(counts) == {
        result["tokens_per_rank"]
    }


def is_standard(result: Mapping[str, Any]) -> bool:
    """Whether a result is of a published model as it is, uniform routing and equal tokens."""
    names = ("num_experts", "num_topk", "hidden", "intermediate_hidden")
    layer = result.get("layer")  # results of 2026-11-20 have none: there were no options for it
    return (
        result["model"] in PRESETS
        and (layer is None or tuple(layer[name] for name in names) == PRESETS[result["model"]])
        and is_even(result)
    )


def compared(
    result: Mapping[str, Any], gpu: str, elsewhere: Mapping[str, float] | None = None
) -> dict[str, Any] | None:
    """A result beside the best peer at its size, the one timed in the same run among them, and
    beside what is asked. None where there is nothing to compare with: for problems that are not
    even, and for sizes of others than published models of which nothing is asked.

    elsewhere: microseconds of peers timed in other runs, by name.
    """
    num_tokens, num_ranks = result["tokens_per_rank"], result["num_ranks"]
    goal = asked(result["model"], gpu, num_ranks)
    if not is_even(result) or (goal is None and not is_standard(result)):
        return None
    curves = figures(result["model"], gpu, num_ranks)
    peers = {curve.name: curve.us[num_tokens] for curve in curves if num_tokens in curve.us}
    peers |= elsewhere or {}
    if "peer" in result:
        peers[PEER_HERE] = result["peer"]["us"]
    if not peers:
        return None
    best = min(peers, key=lambda name: peers[name])
    comparison: dict[str, Any] = {
        "best_peer": best,
        "best_peer_us": peers[best],
        "times_slower": peers[best] / result["us"],
    }
    times = None if goal is None else goal.times_at(num_tokens)
    if times is not None:
        comparison |= {"asked_times": times, "goal_us": peers[best] / times}
    return comparison


def words(comparison: Mapping[str, Any]) -> str:
    """A comparison for people."""
    text = f"best peer {comparison['best_peer_us']:.1f} us ({comparison['times_slower']:.2f}x"
    if "goal_us" not in comparison:
        return text + ")"
    our_us = comparison["best_peer_us"] / comparison["times_slower"]
    return (
        f"{text} of {comparison['asked_times']:g}x)  goal {comparison['goal_us']:.0f} us "
        f"({our_us / comparison['goal_us'] - 1:+.0%})"
    )


@cache
def _read() -> tuple[list[Figures], list[Asked]]:
    document = json.loads(FILE.read_text())

    def by_tokens(us: Mapping[str, float]) -> dict[int, float]:
        return {int(num_tokens): value for num_tokens, value in us.items()}

    curves = [Figures(**{**curve, "us": by_tokens(curve["us"])}) for curve in document["figures"]]
    goals = [
        Asked(**{**goal, "times": tuple(tuple(row) for row in goal["times"])})
        for goal in document["asked"]
    ]
    return curves, goals
