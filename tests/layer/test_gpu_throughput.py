"""The throughput all-to-all on GPUs: every bit of each step, calls in a row, graphs, overflow."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deep_moe import jit
from deep_moe.errors import MegaMoEError
from deep_moe.heuristics.throughput import ThroughputConfig, ThroughputShape
from deep_moe.split.throughput import AllToAll, Received
from deep_moe.targets import target_of_device
from deep_moe.tokens import ALL_TO_ALL_FORMATS
from tests.layer.conftest import ALL, RunRanks
from tests.layer.rank_pool import Place, Rank
from tests.split.reference import bits, quantized
from tests.split.throughput_reference import (
    Inputs,
    check_received,
    expected_scalars,
    expected_sums,
    random_inputs,
    without_masked,
)

NUM_REPLAYS = 1000
SIZES: dict[str, Any] = {
    "max_tokens_per_rank": 160,
    "hidden": 512,
    "num_topk": 4,
    "max_recv_rows": 4096,
    "expert_alignment": 32,
}


def make(rank: Rank, **changes: Any) -> AllToAll:
    sizes = {**SIZES, "num_experts": 4 * rank.num_ranks, **changes}
    return AllToAll(rank.group, device=rank.device, **sizes)


def gpu_configs(num_ranks: int) -> Iterator[ThroughputConfig]:
    """Of the kernels that the tests take on this machine's GPUs."""
    device = torch.device("cuda")
    shape = ThroughputShape(num_ranks=num_ranks, num_experts=4 * num_ranks, **SIZES)
    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    common = (num_ctas, target_of_device(device).name)
    for name in ALL_TO_ALL_FORMATS:
        yield ThroughputConfig(shape, "dispatch", *common, has_weights=True, token_format=name)
    yield ThroughputConfig(shape, "dispatch", *common, has_weights=True, knows_rows=True)
    for sends_rows in (False, True):
        yield ThroughputConfig(shape, "combine", *common, has_weights=True, sends_rows=sends_rows)
    yield ThroughputConfig(shape, "scalars", *common)
    masked_steps: list[dict[str, Any]] = [
        {"step": "dispatch", "has_weights": True},
        {"step": "dispatch", "knows_rows": True},
        {"step": "combine", "has_weights": True, "sends_rows": True},
        {"step": "scalars"},
    ]
    for fields in masked_steps:
        arch = target_of_device(device).name
        yield ThroughputConfig(shape, num_ctas=num_ctas, arch=arch, masks_ranks=True, **fields)


@pytest.fixture(scope="module")
def compiled() -> None:
    """On all CPUs at once: one by one takes longer than to run the tests."""
    configs = [c for n in {1, torch.cuda.device_count()} for c in gpu_configs(n)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(jit.build, configs))


def inputs_of(layer: AllToAll, seed: int, most: int) -> Inputs:
    """The same on every rank, so that each knows what all others bring."""
    counts = [(most, 0, most // 2, 1)[(seed + rank) % 4] for rank in range(layer.shape.num_ranks)]
    return random_inputs(layer.shape, counts, seed)


def on_host(received: Received) -> Received:
    return Received._make(None if tensor is None else tensor.cpu() for tensor in received)


def every_step(rank: Rank, most: int) -> None:
    """most: tokens of a rank. Steps of one kind follow each other, too."""
    layer = make(rank)
    shape = layer.shape
    for seed, name in enumerate(ALL_TO_ALL_FORMATS):
        inputs = inputs_of(layer, seed, most)
        ids, weights = inputs.topk_idxs, inputs.topk_weights
        x, own_ids, own_weights, y, values = (
            of_ranks[rank.idx].to(rank.device)
            for of_ranks in (inputs.xs, ids, weights, inputs.ys, inputs.values)
        )
        received, handle = layer.dispatch(x, own_ids, topk_weights=own_weights, token_format=name)
        check_received(
            shape,
            on_host(received),
            rank.idx,
            ids,
            inputs.xs,
            token_format=name,
            weights=weights,
        )
        if name in ("fp8_128", "mxfp8"):
            values_fp8, scales = quantized(x.cpu(), name)
            assert scales is not None
            given, _ = layer.dispatch(
                values_fp8.to(rank.device),
                own_ids,
                x_sf=scales.to(rank.device),
                token_format=name,
            )
            check_received(shape, on_host(given), rank.idx, ids, inputs.xs, token_format=name)
        again, _ = layer.dispatch(x, topk_weights=own_weights, token_format="bf16", handle=handle)
        check_received(shape, on_host(again), rank.idx, ids, inputs.xs, factors=weights)
        buffer = layer.get_combine_buffer().copy_(y)
        sums = expected_sums(shape, rank.idx, ids, inputs.ys, weights[rank.idx])
        for rows in (buffer, y):
            out = layer.combine(rows, handle, topk_weights=own_weights)
            assert torch.equal(bits(out.cpu()), bits(sums))
        for _ in range(2):
            scalars = layer.return_scalars(values, handle)
            expected = expected_scalars(shape, rank.idx, ids, inputs.values)
            assert torch.equal(bits(scalars.cpu()), bits(expected))
    layer.check()
    rank.barrier()
    layer.close()


def repeats_differ(rank: Rank, most: int, num_calls: int, in_graph: bool) -> int:
    """How many calls gave other bits than the first one with the same tokens. A graph has two
    dispatches and then two combines, so that steps of a kind follow each other."""
    layer = make(rank)
    parts = []
    for seed in range(2):
        inputs = inputs_of(layer, seed, most)
        given = (inputs.xs, inputs.topk_idxs, inputs.ys)
        parts.append(tuple(of_ranks[rank.idx].to(rank.device) for of_ranks in given))

    def calls() -> list[torch.Tensor]:
        handles = [layer.dispatch(x, ids)[1] for x, ids, _ in parts]
        return [layer.combine(y, handle) for (*_, y), handle in zip(parts, handles, strict=True)]

    firsts = [out.clone() for out in calls()]
    for seed, first in enumerate(firsts):
        inputs = inputs_of(layer, seed, most)
        expected = expected_sums(layer.shape, rank.idx, inputs.topk_idxs, inputs.ys)
        assert torch.equal(bits(first.cpu()), bits(expected))
    graph = None
    outs: list[torch.Tensor] = []
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own thread looks at its events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = calls()
    num_different = torch.zeros((), dtype=torch.int64, device=rank.device)
    for _ in range(num_calls):
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


def overflow(rank: Rank) -> str:
    """What a rank says of a dispatch in which the last rank would get too many rows."""
    layer = make(rank, max_recv_rows=128)
    x = torch.ones(160, 512, dtype=torch.bfloat16, device=rank.device)
    ids = torch.full((160, 4), layer.shape.num_experts - 1, device=rank.device)

    def dispatch(num_tokens: int) -> None:
        layer.dispatch(x[:num_tokens], ids[:num_tokens])
        rank.synchronize()
        layer.check()

    with pytest.raises(MegaMoEError) as error:
        dispatch(160)
    layer.reset()
    dispatch(1)
    rank.barrier()
    layer.close()
    return str(error.value)


def disagree(rank: Rank) -> str:
    """What a rank says of a combine whose rows only the first rank has in the combine buffer."""
    layer = make(rank)
    inputs = inputs_of(layer, 0, 160)
    x, ids, y = (of[rank.idx].to(rank.device) for of in (inputs.xs, inputs.topk_idxs, inputs.ys))
    _, handle = layer.dispatch(x, ids)

    def combine() -> None:
        layer.combine(layer.get_combine_buffer() if rank.idx == 0 else y, handle)
        rank.synchronize()
        layer.check()

    with pytest.raises(MegaMoEError) as error:
        combine()
    layer.reset()
    _, handle = layer.dispatch(x, ids)
    out = layer.combine(y, handle)
    expected = expected_sums(layer.shape, rank.idx, inputs.topk_idxs, inputs.ys)
    assert torch.equal(bits(out.cpu()), bits(expected))
    rank.barrier()
    layer.close()
    return str(error.value)


Steps = tuple[Received, Received, torch.Tensor, torch.Tensor]


def masked(rank: Rank, most: int, in_graph: bool) -> None:
    """Steps of all ranks, then without the last one, which does not come; twice."""
    layer = make(rank)
    shape, last = layer.shape, rank.num_ranks - 1
    masked_ranks = torch.zeros(rank.num_ranks, dtype=torch.int32, device=rank.device)
    mask: dict[str, Any] = {"masked_ranks": masked_ranks}
    inputs = inputs_of(layer, 0, most)
    ids, weights = inputs.topk_idxs, inputs.topk_weights
    x, own_ids, own_weights, y, values = (
        of_ranks[rank.idx].to(rank.device)
        for of_ranks in (inputs.xs, ids, weights, inputs.ys, inputs.values)
    )

    def steps() -> Steps:
        received, handle = layer.dispatch(x, own_ids, topk_weights=own_weights, **mask)
        again, _ = layer.dispatch(x, handle=handle, **mask)
        out = layer.combine(y, handle, topk_weights=own_weights, **mask)
        return received, again, out, layer.return_scalars(values, handle, **mask)

    def check(results: Steps, left_out: list[int]) -> None:
        received, again, out, scalars = results
        used = without_masked(shape, ids, left_out)
        check_received(shape, on_host(received), rank.idx, used, inputs.xs, weights=weights)
        check_received(shape, on_host(again), rank.idx, used, inputs.xs)
        sums = expected_sums(shape, rank.idx, used, inputs.ys, weights[rank.idx])
        assert torch.equal(bits(out.cpu()), bits(sums))
        expected = expected_scalars(shape, rank.idx, used, inputs.values)
        assert torch.equal(bits(scalars.cpu()), bits(expected))
        layer.check()

    results = steps()
    graph = None
    if in_graph:
        check(results, [])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = steps()
    for _ in range(2):
        for left_out in ([], [last]):
            rank.barrier()  # the last rank has read what it needs of the others
            if rank.idx in left_out:
                continue
            masked_ranks.zero_()
            masked_ranks[left_out] = 1
            if graph is None:
                results = steps()
            else:
                graph.replay()
            check(results, left_out)
        layer.reset()  # of all ranks, so that the last one may come back
    layer.close()


def check_overflow(messages: list[str]) -> None:
    num_ranks = len(messages)
    text = f"rank {num_ranks - 1} would get {640 * num_ranks} rows"
    assert all(text in message for message in messages), messages


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
def test_every_bit(run_ranks: RunRanks, compiled: None, num_ranks: int) -> None:
    run_ranks(Place.GPUS, num_ranks, every_step, 160)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["calls", "graph"])
def test_calls_in_a_row(
    run_ranks: RunRanks, compiled: None, num_ranks: int, in_graph: bool
) -> None:
    found = run_ranks(Place.GPUS, num_ranks, repeats_differ, 160, NUM_REPLAYS, in_graph)
    assert set(found) == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
def test_overflow_is_an_error_on_every_rank(run_ranks: RunRanks, num_ranks: int) -> None:
    check_overflow(run_ranks(Place.GPUS, num_ranks, overflow))


@pytest.mark.gpu
def test_ranks_must_agree_where_rows_are(run_ranks: RunRanks, compiled: None) -> None:
    for message in run_ranks(Place.GPUS, ALL, disagree):
        assert "on all ranks or on none" in message


@pytest.mark.gpu
@pytest.mark.parametrize("in_graph", [False, True], ids=["calls", "graph"])
def test_a_rank_that_is_left_out(run_ranks: RunRanks, compiled: None, in_graph: bool) -> None:
    run_ranks(Place.GPUS, ALL, masked, 160, in_graph)


@pytest.mark.slow
def test_the_same_in_the_emulator(run_ranks: RunRanks) -> None:
    run_ranks(Place.CPU, 2, every_step, 12)
    assert run_ranks(Place.CPU, 2, repeats_differ, 12, 2, False) == [0, 0]
    check_overflow(run_ranks(Place.CPU, 2, overflow))
    run_ranks(Place.CPU, 2, masked, 12, False)
