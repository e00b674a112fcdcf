"""Traces of the all-to-all: every phase of every CTA, in a file that viewers read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deep_moe.jit.kernel_args import NUM_SPLIT_PHASES
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.split.layer import EPLowLatencyAllToAllLayer
from deep_moe.split.profile import phases

from . import throughput_reference
from .reference import bits, check_dispatched, expected_out, random_inputs

NUM_CTAS = 3
DISPATCH = ["quant_and_put", "count_put", "wait", "postprocess"]
COMBINE = ["copy_and_put", "recv_wait", "topk_reduce"]


def events_of(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ns"
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_header_names_every_phase() -> None:
    assert phases() == (*DISPATCH, *COMBINE)
    assert len(phases()) == NUM_SPLIT_PHASES


@pytest.mark.parametrize("receive", [True, False])
def test_every_phase_of_every_cta(tmp_path: Path, receive: bool) -> None:
    """Results are the same bits as without stamps."""
    layer = EmulatedAllToAll(
        2, 8, 256, 8, 3, num_sms=NUM_CTAS, timeout_s=100.0, enable_profiling=True
    )
    for seed in range(2):
        inputs = random_inputs(layer.shape, (8, 5), seed)
        results = layer.dispatch(inputs.xs, inputs.topk_idxs, receive=receive)
        handles = [result.handle for result in results]
        if not receive:
            layer.receive(handles)
        outs = layer.combine(
            inputs.ys, inputs.topk_idxs, inputs.topk_weights, handles, receive=receive
        )
        if not receive:
            layer.receive(handles)
        for rank, (result, out) in enumerate(zip(results, outs, strict=True)):
            check_dispatched(layer.shape, result, rank, inputs.xs, inputs.topk_idxs)
            weights = inputs.topk_weights[rank]
            expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
            assert (bits(out) == bits(expected)).all()
    for rank, own in enumerate(layer.layers):
        own.dump_dispatch_trace(tmp_path / "new" / "dispatch.json")
        own.dump_combine_trace(tmp_path / "combine.json")
        for step, names in (("new/dispatch", DISPATCH), ("combine", COMBINE)):
            events = events_of(tmp_path / f"{step}.json")
            assert {event["pid"] for event in events} == {rank}
            assert {event["args"]["call"] for event in events} == {0, 1}
            # The emulator's clock stands still while a warp has its turn, so short phases may be 0.
            assert sum(event["dur"] for event in events) > 0
            for cta in range(NUM_CTAS):
                for call in range(2):
                    chosen = [e for e in events if (e["tid"], e["args"]["call"]) == (cta, call)]
                    chosen.sort(key=lambda event: event["ts"])
                    found = [event["name"] for event in chosen]
                    # The last CTA tells the counts, before it sends tokens.
                    counts = [name for name in names if name == "count_put"]
                    others = [name for name in names if name != "count_put"]
                    assert found == (counts if cta == NUM_CTAS - 1 else []) + others
                    assert min(event["dur"] for event in chosen) >= 0
                    ends = [event["ts"] + event["dur"] for event in chosen]
                    starts = [event["ts"] for event in chosen]
                    assert all(e <= s + 1e-3 for e, s in zip(ends, starts[1:], strict=False))
    layer.close()


@pytest.mark.parametrize("in_buffer", [True, False])
def test_the_phases_of_the_throughput_path(tmp_path: Path, in_buffer: bool) -> None:
    """A dispatch on known rows counts nothing; numbers are those of their dispatch."""
    layer = EmulatedThroughputAllToAll(
        2, 8, 256, 8, 3, 64, expert_alignment=1, num_sms=NUM_CTAS, enable_profiling=True
    )
    inputs = throughput_reference.random_inputs(layer.shape, (8, 5))
    results = layer.dispatch(inputs.xs, inputs.topk_idxs)
    ys = inputs.ys
    if in_buffer:
        ys = [own.get_combine_buffer().copy_(y) for own, y in zip(layer.layers, ys, strict=True)]
    handles = [handle for _, handle in results]
    outs = layer.combine(ys, handles)
    layer.dispatch(inputs.xs, handles=handles)
    layer.return_scalars(inputs.values, handles)  # which has no phases
    for rank, own in enumerate(layer.layers):
        expected = throughput_reference.expected_sums(
            layer.shape, rank, inputs.topk_idxs, inputs.ys, None
        )
        assert (bits(outs[rank]) == bits(expected)).all()
        own.dump_dispatch_trace(tmp_path / "dispatch.json")
        own.dump_combine_trace(tmp_path / "combine.json")
        for step, names in (("dispatch", DISPATCH), ("combine", COMBINE)):
            events = events_of(tmp_path / f"{step}.json")
            assert {(event["pid"], event["args"]["call"]) for event in events} == {(rank, 0)}
            assert {event["tid"] for event in events} == set(range(NUM_CTAS))
            numbers = Counter(event["name"] for event in events)
            twice = dict.fromkeys(names, NUM_CTAS * (2 if step == "dispatch" else 1))
            if step == "dispatch":
                twice["count_put"] = NUM_CTAS
            assert numbers == twice
            assert all(event["dur"] >= 0 for event in events)
        quiet = EmulatedThroughputAllToAll(1, 4, 128, 4, 2, 16, num_sms=2).layers[0]
        with pytest.raises(ValueError, match="enable_profiling must be True"):
            quiet.dump_combine_trace(tmp_path / "trace.json")


def test_what_cannot_be_dumped(tmp_path: Path) -> None:
    quiet = EmulatedAllToAll(1, 4, 128, 4, 2, num_sms=2)
    with pytest.raises(ValueError, match="enable_profiling must be True"):
        quiet.layers[0].dump_dispatch_trace(tmp_path / "trace.json")
    layer = EmulatedAllToAll(1, 4, 128, 4, 2, num_sms=2, enable_profiling=True)
    with pytest.raises(ValueError, match="nothing was recorded: no combine was made"):
        layer.layers[0].dump_combine_trace(tmp_path / "trace.json")


def test_under_the_other_layers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layer = EPLowLatencyAllToAllLayer(
        4, 256, 2, True, 0, 4, 1, 1, enable_profiling=True, device="cpu"
    )
    inputs = random_inputs(layer._all_to_all.shape, (4,))
    ids = inputs.topk_idxs[0]
    *_, meta = layer.dispatch(inputs.xs[0], None, ids)
    layer.combine(inputs.ys[0], ids, inputs.topk_weights[0], meta)
    layer.dump_dispatch_trace()
    layer.dump_combine_trace()
    for step, names in (("dispatch", DISPATCH), ("combine", COMBINE)):
        events = events_of(tmp_path / f"prof/ll_{step}_RANK_0.json")
        assert {event["name"] for event in events} == set(names)
    layer.finalize()
