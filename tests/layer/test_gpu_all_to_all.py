"""The all-to-all of the split path on GPUs: every bit, calls in a row, in graphs, and by DeepEP's
names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_moe import jit
from deep_moe.heuristics.low_latency import (
    ALL_TO_ALL_FORMATS,
    PLACEMENTS,
    LowLatencyConfig,
    LowLatencyShape,
    Placement,
)
from deep_moe.split.handle import Dispatched
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.split.profile import phases
from deep_moe.targets import target_of_device
from tests.compat import deep_ep_calls
from tests.layer.conftest import ALL, RunRanks
from tests.layer.rank_pool import Place, Rank
from tests.split.reference import Inputs, bits, check_dispatched, expected_out, random_inputs

NUM_CALLS = 10_000
NUM_INPUTS = 4  # that come in turn
SIZES: dict[str, Any] = {"num_max_tokens_per_rank": 16, "hidden": 512, "num_topk": 4}


def make(rank: Rank, **options: Any) -> LowLatencyAllToAll:
    return LowLatencyAllToAll(
        rank.group,
        num_experts=4 * rank.num_ranks,
        device=rank.device,
        any_format=True,
        zero_copy=True,
        **SIZES,
        **options,
    )


def gpu_configs(num_ranks: int) -> Iterator[LowLatencyConfig]:
    """Of all kernels that the tests' own layers take on this machine's GPUs."""
    device = torch.device("cuda")
    shape = LowLatencyShape(
        num_ranks,
        num_experts=4 * num_ranks,
        token_format="fp8_128",
        has_shared_rows=True,
        any_format=True,
        **SIZES,
    )
    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    dispatch = LowLatencyConfig(shape, "dispatch", num_ctas, target_of_device(device).name)
    combine = replace(dispatch, step="combine")
    for sends, receives in ((True, True), (True, False), (False, True)):
        parts: dict[str, Any] = {"sends": sends, "receives": receives}
        for format, placement in product(ALL_TO_ALL_FORMATS, PLACEMENTS):
            of_call = replace(shape, token_format=format, placement=placement)
            yield replace(dispatch, shape=of_call, **parts)
        for fetches_rows in (False, True):
            yield replace(combine, fetches_rows=fetches_rows, **parts)
    yield replace(combine, repeats=True)


@pytest.fixture(scope="module")
def compiled() -> None:
    """On all CPUs at once: one by one takes longer than to run the tests."""
    configs = [c for n in {1, torch.cuda.device_count()} for c in gpu_configs(n)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(jit.build, configs))


def inputs_of(layer: LowLatencyAllToAll, seed: int) -> Inputs:
    """The same on every rank, so that each knows what all others bring."""
    num_tokens = [(16, 0, 5, 1)[(seed + rank) % 4] for rank in range(layer.shape.num_ranks)]
    return random_inputs(layer.shape, num_tokens, seed)


def own_part(inputs: Inputs, rank: Rank) -> tuple[torch.Tensor, ...]:
    tensors = (inputs.xs, inputs.topk_idxs, inputs.topk_weights, inputs.ys)
    return tuple(of_ranks[rank.idx].to(rank.device) for of_ranks in tensors)


def check_result(shape: LowLatencyShape, result: Dispatched, rank: Rank, inputs: Inputs) -> None:
    on_host = (None if t is None else t.cpu() for t in result[:5])
    made = Dispatched._make([*on_host, result.handle])
    check_dispatched(shape, made, rank.idx, inputs.xs, inputs.topk_idxs)


def expected(layer: LowLatencyAllToAll, rank: Rank, inputs: Inputs) -> torch.Tensor:
    weights = inputs.topk_weights[rank.idx]
    return expected_out(layer.shape, rank.idx, inputs.topk_idxs, weights, inputs.ys)


def every_kind_of_call(rank: Rank, placement: Placement = "ranks") -> None:
    layer = make(rank, scales_by_column=True, placement=placement)
    seed = 0
    for format in ALL_TO_ALL_FORMATS:
        for receive in (True, False):
            for zero_copy in (False, True):
                inputs = inputs_of(layer, seed)
                x, ids, weights, y = own_part(inputs, rank)
                result = layer.dispatch(x, ids, token_format=format, receive=receive)
                if not receive:
                    layer.receive(result.handle)
                shape = replace(layer.shape, token_format=format)
                check_result(shape, result, rank, inputs)
                if zero_copy:
                    y = layer.get_combine_buffer(result.handle).copy_(y)
                out = layer.combine(
                    y, ids, weights, result.handle, zero_copy=zero_copy, receive=receive
                )
                if not receive:
                    layer.receive(result.handle)
                assert torch.equal(bits(out.cpu()), bits(expected(layer, rank, inputs)))
                seed += 1
    layer.check()
    rank.barrier()
    layer.close()


def combined_again(rank: Rank) -> None:
    """Other rows each time; ranks do not wait for each other in between."""
    layer = make(rank)
    inputs = inputs_of(layer, 0)
    x, ids, weights, _ = own_part(inputs, rank)
    result = layer.dispatch(x, ids)
    rows = [inputs_of(layer, 10 + i).ys for i in range(6)]
    ys = [of_ranks[rank.idx].to(rank.device) for of_ranks in rows]
    outs = [layer.combine(y, ids, weights, result.handle, again=i > 0) for i, y in enumerate(ys)]
    for of_ranks, out in zip(rows, outs, strict=True):
        inputs.ys = of_ranks
        assert torch.equal(bits(out.cpu()), bits(expected(layer, rank, inputs)))
    layer.check()
    rank.barrier()
    layer.close()


def repeats_differ(rank: Rank, num_calls: int, in_graph: bool) -> int:
    """How many calls gave other bits than the first one with the same tokens, which change from
    call to call. A graph has one call of each kind of tokens, and no call waits for the host."""
    layer = make(rank)
    parts = [own_part(inputs_of(layer, seed), rank) for seed in range(NUM_INPUTS)]

    def calls() -> list[torch.Tensor]:
        outs = []
        for x, ids, weights, y in parts:
            result = layer.dispatch(x, ids)
            outs.append(layer.combine(y, ids, weights, result.handle))
        return outs

    firsts = [out.clone() for out in calls()]
    for seed, first in enumerate(firsts):
        inputs = inputs_of(layer, seed)
        assert torch.equal(bits(first.cpu()), bits(expected(layer, rank, inputs)))
    graph = None
    outs: list[torch.Tensor] = []
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own thread looks at its events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = calls()
    num_different = torch.zeros((), dtype=torch.int64, device=rank.device)
    for _ in range(-(-num_calls // NUM_INPUTS)):
        if graph is None:
            outs = calls()
        else:
            graph.replay()
        for out, first in zip(outs, firsts, strict=True):
            num_different += (bits(out) != bits(first)).any()
    rank.synchronize()
    layer.check()
    rank.barrier()
    layer.close()
    return int(num_different)


def traces(rank: Rank, folder: str) -> dict[str, float]:
    """The latest end of each phase, in microseconds from the begin of the first kernel of its step;
    three calls, so that none of them is the first of its kind."""
    layer = make(rank, enable_profiling=True)
    for seed in range(3):
        x, ids, weights, y = own_part(inputs_of(layer, seed), rank)
        result = layer.dispatch(x, ids)
        layer.combine(y, ids, weights, result.handle)
    rank.synchronize()
    ends: dict[str, float] = {}
    for step, dump in (
        ("dispatch", layer.dump_dispatch_trace),
        ("combine", layer.dump_combine_trace),
    ):
        path = Path(folder) / f"{step}-{rank.idx}.json"
        dump(path)
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] == "X":
                assert event["dur"] >= 0
                end = event["ts"] + event["dur"]
                ends[event["name"]] = max(end, ends.get(event["name"], 0.0))
    layer.check()
    rank.barrier()
    layer.close()
    return ends


def check_traces(found: list[dict[str, float]]) -> None:
    for ends in found:
        assert set(ends) == set(phases())
        for order in (
            ("quant_and_put", "wait", "postprocess"),
            ("copy_and_put", "recv_wait", "topk_reduce"),
        ):
            times = [ends[phase] for phase in order]
            # A time is the sum of a beginning and a duration, both rounded.
            assert times == pytest.approx(sorted(times), abs=1e-6)


def deep_ep(rank: Rank) -> None:
    """On its own stream, with events, and with hooks."""
    num_experts = deep_ep_calls.NUM_EXPERTS
    if num_experts % rank.num_ranks:
        return
    buffer = deep_ep_calls.make(rank.num_ranks, rank.group, device=rank.device)
    deep_ep_calls.check_every_kind_of_call(
        buffer, rank.idx, rank.num_ranks, (False, True), rank.device
    )
    rank.barrier()
    buffer.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
@pytest.mark.parametrize("work", [every_kind_of_call, combined_again])
def test_every_bit(run_ranks: RunRanks, compiled: None, num_ranks: int, work: Any) -> None:
    run_ranks(Place.GPUS, num_ranks, work)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
def test_every_bit_of_messages_for_each_expert(
    run_ranks: RunRanks, compiled: None, num_ranks: int
) -> None:
    run_ranks(Place.GPUS, num_ranks, every_kind_of_call, "experts")


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2], ids=["one_gpu", "two_gpus"])
def test_deep_eps_calls(run_ranks: RunRanks, num_ranks: int) -> None:
    run_ranks(Place.GPUS, num_ranks, deep_ep)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["calls", "graph"])
def test_ten_thousand_calls_in_a_row(
    run_ranks: RunRanks, compiled: None, num_ranks: int, in_graph: bool
) -> None:
    found = run_ranks(Place.GPUS, num_ranks, repeats_differ, NUM_CALLS, in_graph)
    assert set(found) == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
def test_traces(run_ranks: RunRanks, num_ranks: int, tmp_path: Path) -> None:
    check_traces(run_ranks(Place.GPUS, num_ranks, traces, str(tmp_path)))


@pytest.mark.slow
def test_the_same_in_the_emulator(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_traces(run_ranks(Place.CPU, 2, traces, str(tmp_path)))
    run_ranks(Place.CPU, 2, every_kind_of_call)
    run_ranks(Place.CPU, 2, every_kind_of_call, "experts")
    run_ranks(Place.CPU, 2, combined_again)
    run_ranks(Place.CPU, 2, deep_ep)
    assert run_ranks(Place.CPU, 2, repeats_differ, 8, False) == [0, 0]
