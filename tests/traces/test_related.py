"""Which block a warp is at, and whom a wait waits for."""

from __future__ import annotations

import numpy as np
import pytest

from deep_moe.split.profile import phases
from deep_moe.traces.step_kinds import KINDS, PHASES
from deep_moe.traces.timeline import NONE, Lane, empty_spans, in_order
from deep_moe.trial.trace import steps

from .made_up import index_of, small_timeline, timeline_of_rows


def test_all_roles_know_their_block():
    timeline = small_timeline()
    fields = ("expert", "m_block", "n_block", "rows")
    for cta, linear, block in ((0, "Linear1", (1, 3, 0, 8)), (1, "Linear2", (1, 3, 5, 8))):
        for role, step in (
            ("activation loader", f"wait for {linear} tokens"),
            ("activation loader", f"load {linear}"),
            ("weight loader", f"load {linear}"),
            ("math", f"{linear} main loop"),
            ("math", f"{linear} epilogue"),
        ):
            span = timeline.spans[index_of(timeline, 0, cta, role, step)]
            assert tuple(span[list(fields)].tolist()) == block, (role, step)


def test_a_wait_names_what_it_waited_for():
    timeline = small_timeline()
    loader, barrier = "activation loader", "rank barrier before combine"
    awaited = {
        (0, 0, "math", "wait for a block", 0): (0, 0, loader, "load Linear1"),
        (0, 1, "math", "wait for a block", 0): (0, 1, loader, "load Linear2"),
        (0, 1, loader, "wait for Linear2 tokens", 0): (0, 0, "math", "Linear1 epilogue"),
        (0, 1, "dispatch", barrier, 0): (1, 0, "dispatch", barrier),
        (0, 1, "combine", "wait for combine", 0): (1, 0, "dispatch", barrier),
    }
    expected = np.full(len(timeline.spans), NONE)
    for wait, other in awaited.items():
        expected[index_of(timeline, *wait)] = index_of(timeline, *other)
    assert timeline.spans["awaited"].tolist() == expected.tolist()


def test_on_sm100_the_even_cta_multiplies_for_both():
    block = {"expert": 0, "n_block": 0, "rows": 4}
    rows = {
        (0, cta): [
            ("activation loader", "wait for Linear1 tokens", 0.0, 10.0, {"m_block": 2, "rows": 4}),
            ("activation loader", "load Linear1", 10.0, 50.0, {}),
            ("weight loader", "load Linear1", 5.0, 60.0, block),
            *([("math", "Linear1 main loop", 20.0, 80.0, block)] if cta == 0 else []),
            ("epilogue", "wait for a block", 0.0, 90.0, {}),
            ("epilogue", "Linear1 epilogue", 90.0, 99.0, block),
        ]
        for cta in (0, 1)
    }
    timeline = timeline_of_rows(rows)
    products = index_of(timeline, 0, 0, "math", "Linear1 main loop")
    for cta in (0, 1):
        wait = index_of(timeline, 0, cta, "epilogue", "wait for a block")
        assert timeline.spans["awaited"][wait] == products
        results = index_of(timeline, 0, cta, "epilogue", "Linear1 epilogue")
        assert timeline.spans["m_block"][results] == 2


def test_where_records_are_lost_nothing_is_made_up():
    """The loader's first block is missing, so that its second one stands where the first was."""
    block = {"expert": 0, "n_block": 0, "rows": 4}
    timeline = timeline_of_rows(
        {
            (0, 0): [
                ("activation loader", "wait for Linear2 tokens", 0, 10, {"m_block": 7}),
                ("activation loader", "load Linear2", 10, 50, {}),
                ("math", "Linear1 main loop", 20, 80, block),
                ("math", "Linear1 epilogue", 80, 90, {}),
            ]
        }
    )
    results = index_of(timeline, 0, 0, "math", "Linear1 epilogue")
    assert timeline.spans["expert"][results] == timeline.spans["m_block"][results] == NONE


def test_spans_of_several_warps_get_lanes_of_their_own():
    lanes = [Lane(0, 1, "all-to-all"), Lane(0, 0, "all-to-all")]
    spans = empty_spans(5)
    spans["lane"] = [0, 0, 0, 0, 1]
    spans["start_ns"] = [0, 50, 60, 100, 0]
    spans["end_ns"] = [100, 120, 70, 130, 9]
    found, own = in_order(lanes, spans)
    assert found == [
        Lane(0, 0, "all-to-all"),
        *(Lane(0, 1, role) for role in ("all-to-all", "all-to-all +1", "all-to-all +2")),
    ]
    assert own["lane"].tolist() == [0, 1, 1, 2, 3]
    assert own["start_ns"].tolist() == [0, 0, 100, 50, 60]


def test_every_step_of_a_kernel_is_known():
    ends = {"nothing recorded", "end of the track"}
    for name in {*steps().text.values(), *phases()} - ends:
        kind = KINDS[name]
        assert kind.phase in ("", *PHASES)
        is_wait = name.startswith(("wait", "gather", "rank barrier")) or name == "recv_wait"
        assert bool(kind.awaited) == is_wait, name


@pytest.mark.parametrize("name", ["memory", "fence"])
def test_waits_of_any_kernel_are_known(name: str):
    assert KINDS[name].awaited
