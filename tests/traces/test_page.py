"""What is in a page, read without a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deep_moe.traces.chrome import counter_events, write_events
from deep_moe.traces.chrome_reader import read_trace
from deep_moe.traces.page import page, write_page
from deep_moe.traces.timeline import NONE

from .made_up import large_timeline, small_timeline


def decoded(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray], list[np.ndarray]]:
    """Header, columns of spans, and series, as page/data.js reads them."""
    header = json.loads(re.search(r'id="header">(.*?)</script>', text, re.DOTALL)[1])
    packed = re.search(r'id="columns">(.*?)</script>', text, re.DOTALL)[1]
    raw = zlib.decompress(base64.b64decode(packed), wbits=-15)
    at = 0

    def column(count: int) -> np.ndarray:
        nonlocal at
        planes = np.frombuffer(raw, np.uint8, 4 * count, at).reshape(4, count)
        at += 4 * count
        return np.cumsum(np.ascontiguousarray(planes.T).view("<i4")[:, 0])

    columns = {name: column(header["num_spans"]) for name in header["fields"]}
    series = [column(one["count"]) / header["share_steps"] for one in header["series"]]
    assert at == len(raw)
    return header, columns, series


def test_the_data_come_out_as_they_went_in():
    timeline = small_timeline()
    header, columns, series = decoded(page(timeline, title="a call"))
    spans = timeline.spans
    assert [header["steps"][i]["name"] for i in columns["step"]] == [
        timeline.steps[i] for i in spans["step"]
    ]
    assert columns["start"].tolist() == spans["start_ns"].tolist()
    assert (columns["start"] + columns["duration"]).tolist() == spans["end_ns"].tolist()
    for name in ("expert", "m_block", "n_block", "rows"):
        assert columns[name].tolist() == spans[name].tolist()
    own = np.arange(len(spans))
    awaited = np.where(columns["awaited"] == 0, NONE, own + columns["awaited"])
    assert awaited.tolist() == spans["awaited"].tolist()
    lanes = [(rank, cta, header["roles"][role]) for rank, cta, role, _ in header["lanes"]]
    assert lanes == [(lane.rank, lane.cta, lane.role) for lane in timeline.lanes]
    counts = [count for *_, count in header["lanes"]]
    assert np.repeat(np.arange(len(counts)), counts).tolist() == spans["lane"].tolist()
    assert series[0].tolist() == timeline.series[0].shares.tolist()
    assert header["series"][0]["most"] == 3000.0
    assert header["facts"] == {"chip": "none"}


def test_a_page_needs_nothing_else(tmp_path: Path):
    path = tmp_path / "call.html"
    write_page(small_timeline(), path, title="a <call> & more")
    text = path.read_text()
    assert "<title>a &lt;call&gt; &amp; more</title>" in text
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://|fetch\(|import\(""", text)
    assert not re.search(r"<!-- \w+ -->", text)  # nothing is left to be filled in
    for name in ("data", "colours", "lanes", "charts", "details", "main"):
        source = Path("deep_moe/traces/page") / f"{name}.js"
        assert source.name in {file.name for file in Path("deep_moe/traces/page").iterdir()}


def test_a_header_cannot_end_its_script():
    timeline = replace(small_timeline(), facts={"model": "</script><b>"})
    header, _, _ = decoded(page(timeline, title="x"))
    assert header["facts"] == {"model": "</script><b>"}


def test_time_before_the_first_step_is_kept():
    """A rank may begin before the moment that aligned ranks call 0."""
    timeline = small_timeline()
    timeline.spans["start_ns"] -= 250
    timeline.spans["end_ns"] -= 250
    header, columns, _ = decoded(page(timeline, title="x"))
    assert columns["start"].min() == 0
    assert header["series"][0]["start"] == 250


def test_a_large_call_takes_few_bytes():
    timeline = large_timeline(200_000)
    assert len(page(timeline, title="x")) < 10 * len(timeline.spans)


def test_what_cannot_be_shown_is_refused():
    timeline = small_timeline()
    with pytest.raises(ValueError, match="no steps of any warp"):
        page(replace(timeline, spans=timeline.spans[:0]), title="x")
    timeline.spans["end_ns"][-1] = 3e9
    with pytest.raises(ValueError, match=r"at most 2\.1 s; the trace has 3\.0 s"):
        page(timeline, title="x")


# ---- traces that are files


def test_other_programs_traces_are_shown(tmp_path: Path):
    path = tmp_path / "other.json"
    events = [
        {"ph": "X", "name": "step", "pid": 7, "tid": 9, "ts": 5e12, "dur": 2.5, "args": {"a": "b"}},
        {"ph": "X", "name": "inner", "pid": 7, "tid": 9, "ts": 5e12 + 1, "dur": 1},
        {"ph": "i", "name": "mark", "pid": 7, "tid": 9, "ts": 5e12},
    ]
    path.write_text(json.dumps(events))
    timeline = read_trace(path)
    assert [lane.role for lane in timeline.lanes] == ["thread 9", "thread 9 +1"]
    assert timeline.spans["start_ns"].tolist() == [0, 1000]
    assert timeline.spans["end_ns"].tolist() == [2500, 2000]
    assert timeline.steps == ["step", "inner"]


def test_counters_and_the_unit_come_out_of_a_file(tmp_path: Path):
    path = tmp_path / "call.json.gz"
    series = small_timeline().series[0]
    step = '{"ph":"X","name":"pull","pid":0,"tid":0,"ts":0,"dur":4}'
    write_events([step, *counter_events(series)], path, unit="1000 warp instructions")
    timeline = read_trace(path)
    assert timeline.unit == "1000 warp instructions"
    (found,) = timeline.series
    assert (found.rank, found.name, found.start_ns, found.step_ns) == (0, "memory", 0, 1000)
    assert found.shares.tolist() == series.shares.tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be a trace in Chrome's JSON format"),
        ('{"events": []}', 'must have a list "traceEvents"'),
        ("7", 'must have a list "traceEvents"'),
        ("[]", "holds no complete events"),
        ('[{"ph": "X", "name": "a"}]', "an event is not as Chrome's format has it: KeyError"),
        ('[{"ph": "X", "name": "a", "ts": "b"}]', "an event is not as Chrome's format has it"),
        ('["a"]', "an event is not as Chrome's format has it"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, words: str):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_trace(path)
    assert str(path) in str(error.value)
