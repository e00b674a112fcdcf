"""What warps did and when, as a page shows it: lanes of spans, and how busy units were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .step_kinds import StepKind, kind_of

NONE = -1  # a number that is not known, or means nothing for a span
_ROUNDING_NS = 2.0  # of times in files

SPAN_DTYPE = np.dtype(
    [
        ("lane", np.int32),
        ("step", np.int32),
        ("start_ns", np.float64),
        ("end_ns", np.float64),
        ("expert", np.int32),
        ("m_block", np.int32),
        ("n_block", np.int32),
        ("rows", np.int32),
        ("awaited", np.int32),
    ]
)


@dataclass(frozen=True, order=True)
class Lane:
    """What one warp of a CTA did.

    Attributes:
        rank: whose CTA it is.
        cta: index in the grid. Persistent kernels have one CTA on each SM.
        role: of the warp.
    """

    rank: int
    cta: int
    role: str


@dataclass(frozen=True)
class Series:
    """How busy a unit of one GPU was, in steps of equal length.

    Attributes:
        rank: whose GPU.
        name: of the unit.
        start_ns: when the first step begins.
        step_ns: length of a step.
        shares: float64 [steps], 0 to 1.
        most: what a share of 1 stands for, in `unit`.
        unit: of `most`.
    """

    rank: int
    name: str
    start_ns: float
    step_ns: float
    shares: np.ndarray
    most: float = 100.0
    unit: str = "%"


@dataclass(frozen=True)
class Timeline:
    """A call, or several.

    Attributes:
        lanes: in the order in which they are shown.
        steps: names of what a warp can be at.
        spans: fields of SPAN_DTYPE, in the order of (lane, start_ns). lane and step are indices.
            m_block counts the blocks of a rank's pool. awaited: index of the span whose beginning
            or end a wait waited for. NONE where a number is not known.
        series: how busy units were, where that is known.
        unit: of 1000 ns; without a clock a nanosecond is an instruction of a warp.
        place: what a CTA is called: "SM" where each has one.
        facts: what else is said of the call, by name.
    """

    lanes: Sequence[Lane]
    steps: Sequence[str]
    spans: np.ndarray
    series: Sequence[Series] = ()
    unit: str = "us"
    place: str = "SM"
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> list[StepKind]:
        """Of the steps."""
        return [kind_of(name) for name in self.steps]


def empty_spans(count: int) -> np.ndarray:
    """Spans about which nothing is known."""
    spans = np.zeros(count, SPAN_DTYPE)
    for name in ("expert", "m_block", "n_block", "rows", "awaited"):
        spans[name] = NONE
    return spans


def in_order(lanes: Sequence[Lane], spans: np.ndarray) -> tuple[list[Lane], np.ndarray]:
    """Lanes by rank and CTA, roles of one CTA as they came, and spans in the order of lanes. Spans
    of a lane that overlap, which are of several warps, get lanes of their own."""
    lanes = list(lanes)
    spans = spans[np.lexsort((spans["start_ns"], spans["lane"]))]
    overlap = (spans["lane"][1:] == spans["lane"][:-1]) & (
        spans["start_ns"][1:] < spans["end_ns"][:-1] - _ROUNDING_NS
    )
    for lane in np.unique(spans["lane"][1:][overlap]).tolist():
        ends = [-np.inf]
        of_copies = [lane]
        for i in np.flatnonzero(spans["lane"] == lane).tolist():
            start, end = spans["start_ns"][i], spans["end_ns"][i]
            copy = next((k for k, own in enumerate(ends) if own <= start + _ROUNDING_NS), len(ends))
            if copy == len(ends):
                ends.append(end)
                of_copies.append(len(lanes))
                lanes.append(replace(lanes[lane], role=f"{lanes[lane].role} +{copy}".strip()))
            ends[copy] = end
            spans["lane"][i] = of_copies[copy]
    order = sorted(range(len(lanes)), key=lambda i: (lanes[i].rank, lanes[i].cta, i))
    place = np.empty(len(lanes), np.int32)
    place[order] = np.arange(len(lanes))
    spans["lane"] = place[spans["lane"]]
    return [lanes[i] for i in order], spans[np.lexsort((spans["start_ns"], spans["lane"]))]
