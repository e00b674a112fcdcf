"""A timeline as one HTML file that any browser shows, without a network.

The file holds the data in columns of 32-bit integers: each value as the difference from the one
before, the lowest bytes of all values first, then the next ones, deflated and in base64.
page/data.js reads them.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .step_kinds import PHASES
from .timeline import Timeline

_FOLDER = Path(__file__).parent / "page"
# Concatenated in this order.
_SCRIPTS = ("data.js", "colours.js", "lanes.js", "charts.js", "details.js", "main.js")
_FIELDS = ("step", "start", "duration", "expert", "m_block", "n_block", "rows", "awaited")
_SHARE_STEPS = 10_000  # a share of 1 as an integer
_MOST_NS = 2**31 - 1


def write_page(timeline: Timeline, path: str | Path, *, title: str) -> None:
    """Write the page.

    Args:
        timeline: what it shows.
        path: of the file.
        title: of the page.
    """
    Path(path).write_text(page(timeline, title=title), encoding="utf-8")


def page(timeline: Timeline, *, title: str) -> str:
    """The page's text.

    Args:
        timeline: what it shows. ValueError if it has no spans, or takes longer than 2.1 s.
        title: of the page.
    """
    text = (_FOLDER / "timeline.html").read_text(encoding="utf-8")
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    header, columns = encode(timeline)
    parts = {
        "title": html.escape(title),
        "style": (_FOLDER / "timeline.css").read_text(encoding="utf-8"),
        "script": script,
        "header": json.dumps(header, separators=(",", ":")).replace("<", "\\u003c"),
        "columns": base64.b64encode(columns).decode(),
    }
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def encode(timeline: Timeline) -> tuple[dict[str, Any], bytes]:
    """What the page reads: a header for JSON, and the deflated columns.

    Args:
        timeline: as of `page`.
    """
    spans = timeline.spans
    if not len(spans):
        raise ValueError("the trace holds no steps of any warp: nothing to show")
    begin_ns = min(0.0, float(spans["start_ns"].min()))
    start, end = (np.rint(spans[name] - begin_ns) for name in ("start_ns", "end_ns"))
    if end.max() > _MOST_NS:
        raise ValueError(
            f"a page shows at most {_MOST_NS / 1e9:.1f} s; the trace has {end.max() / 1e9:.1f} s"
        )
    numbers = {
        "start": start,
        "duration": end - start,
        # A wait's partner is near.
        "awaited": np.where(spans["awaited"] < 0, 0, spans["awaited"] - np.arange(len(spans))),
    }
    columns = [_column(numbers[name] if name in numbers else spans[name]) for name in _FIELDS]
    columns += [_column(np.rint(one.shares * _SHARE_STEPS)) for one in timeline.series]
    roles = list(dict.fromkeys(lane.role for lane in timeline.lanes))
    counts = np.bincount(spans["lane"], minlength=len(timeline.lanes))
    kinds = timeline.kinds
    phases = {kinds[step].phase for step in np.unique(spans["step"]).tolist()}
    header = {
        "unit": timeline.unit,
        "place": timeline.place,
        "facts": dict(timeline.facts),
        "phases": [phase for phase in PHASES if phase in phases],
        "roles": roles,
        "lanes": [
            [lane.rank, lane.cta, roles.index(lane.role), count]
            for lane, count in zip(timeline.lanes, counts.tolist(), strict=True)
        ],
        "steps": [
            {"name": name, "phase": kind.phase, "awaited": kind.awaited}
            for name, kind in zip(timeline.steps, kinds, strict=True)
        ],
        "fields": _FIELDS,
        "num_spans": len(spans),
        "series": [
            {
                "rank": one.rank,
                "name": one.name,
                "start": one.start_ns - begin_ns,
                "step": one.step_ns,
                "most": one.most,
                "unit": one.unit,
                "count": len(one.shares),
            }
            for one in timeline.series
        ],
        "share_steps": _SHARE_STEPS,
    }
    compressor = zlib.compressobj(6, wbits=-zlib.MAX_WBITS)  # raw, as browsers take it
    return header, compressor.compress(b"".join(columns)) + compressor.flush()


def _column(values: np.ndarray | Sequence[float]) -> bytes:
    """Differences, byte by byte."""
    whole = np.asarray(values).astype(np.int64)
    differences = np.diff(whole, prepend=0).astype("<i4")
    return differences.view(np.uint8).reshape(-1, 4).T.tobytes()
