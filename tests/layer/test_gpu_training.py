"""The differentiable layer over several ranks: by NCCL and by our all-to-all, against one rank with
all experts and tokens; no host waits, graphs, overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.errors import MegaMoEError
from tests.layer.conftest import ALL, RunRanks
from tests.layer.rank_pool import Place, Rank
from tests.training.plain_layer import Layer, assert_close, assert_equal_bits, random_like

HIDDEN, INTERMEDIATE, NUM_TOPK, LOCAL_EXPERTS = 256, 96, 3, 4
WEIGHTS = ("w1", "w3", "w2", "b1", "b3", "b2")
BF16_ERROR = 4 * 2.0**-9  # as on one GPU beside a CPU
KINDS: dict[str, dict[str, Any]] = {
    "biases": {"biases": True, "activation": "swiglu_oai"},
    "one tensor": {"fused": True, "activation": "situ"},
    "mxfp8": {"fused": True, "precision": "mxfp8"},
    "quantized": {"fused": True, "quantize_kept": True, "intermediate": 128},
    "fp8": {"fused": True, "precision": "fp8", "intermediate": 128},
}


def tokens_of(rank_idx: int, most: int) -> int:
    return (most, 0, most // 2, 1)[rank_idx % 4]


def whole(rank: Rank, most: int, kind: str) -> Layer:
    """Of all ranks, the same on each, on its device; the last expert gets no token."""
    num_tokens = sum(tokens_of(i, most) for i in range(rank.num_ranks))
    layer = Layer.random(
        num_tokens=num_tokens,
        num_topk=NUM_TOPK,
        num_experts=LOCAL_EXPERTS * rank.num_ranks,
        **{"hidden": HIDDEN, "intermediate": INTERMEDIATE, **KINDS[kind]},
    )
    tensors = {
        name: None if t is None else t.detach().to(rank.device).requires_grad_()
        for name, t in layer.tensors.items()
    }
    return Layer(layer.topk_idx.to(rank.device), tensors, layer.options)


def own_slices(rank: Rank, most: int) -> Callable[[str], slice]:
    """Of a tensor with this name, what is the rank's."""
    begin = sum(tokens_of(i, most) for i in range(rank.idx))
    tokens = slice(begin, begin + tokens_of(rank.idx, most))
    experts = slice(rank.idx * LOCAL_EXPERTS, (rank.idx + 1) * LOCAL_EXPERTS)
    return lambda name: experts if name in WEIGHTS else tokens


def part(layer: Layer, rank: Rank, most: int, group: Any) -> Layer:
    own = own_slices(rank, most)
    tensors = {
        name: None if t is None else t[own(name)].detach().clone().requires_grad_()
        for name, t in layer.tensors.items()
    }
    topk_idx = layer.topk_idx[own("topk_idx")].clone()
    return Layer(topk_idx, tensors, {**layer.options, "group": group})


def all_to_all(rank: Rank, most: int, num_recv_rows: int | None = None) -> deep_moe.AllToAll:
    num_rows = rank.num_ranks * most * NUM_TOPK + 8 * LOCAL_EXPERTS
    return deep_moe.AllToAll(
        rank.group,
        most,
        HIDDEN,
        LOCAL_EXPERTS * rank.num_ranks,
        NUM_TOPK,
        num_rows if num_recv_rows is None else num_recv_rows,
        expert_alignment=8,
        device=rank.device,
        num_sms=None if rank.is_gpu else 2,
    )


@contextmanager
def no_host_waits(rank: Rank) -> Iterator[None]:
    if not rank.is_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def parts_of_one_rank(rank: Rank, most: int) -> None:
    for kind in KINDS:
        layer = whole(rank, most, kind)
        expected = layer.run(random_like(layer()).to(rank.device))
        d_out = random_like(expected["out"]).to(rank.device).bfloat16()
        own = own_slices(rank, most)
        d_own = d_out[own("out")]
        ours = all_to_all(rank, most)
        for group in (ours, rank.group):
            mine = part(layer, rank, most, group)
            results = mine.run(d_own)
            close = {name: expected[name][own(name)] for name in results}
            assert_close(results, close, BF16_ERROR)
            keeps = mine.options.get("quantize_kept", False)  # what a second pass has not
            again = mine.run(d_own, recompute=not keeps, keep_received=True)
            assert_equal_bits(results, again)
        mine = part(layer, rank, most, ours)
        with no_host_waits(rank):
            mine.run(d_own)
        ours.check()
        rank.barrier()
        ours.close()


def graph_sees_other_routing(rank: Rank, most: int) -> None:
    ours = all_to_all(rank, most)
    layer = whole(rank, most, "biases")
    mine = part(layer, rank, most, ours)
    d_own = random_like(mine.tensors["x"].detach()).to(rank.device).bfloat16()  # type: ignore[union-attr]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mine.run(d_own)
    torch.cuda.current_stream().wait_stream(stream)
    rank.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mine.run(d_own)
    with torch.no_grad():
        mine.topk_idx.copy_((mine.topk_idx + 1) % (LOCAL_EXPERTS * rank.num_ranks))
        mine.tensors["w2"].mul_(1.5)  # type: ignore[union-attr]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    results = {name: tensor.clone() for name, tensor in captured.items()}
    assert_equal_bits(results, mine.run(d_own))
    ours.check()
    rank.barrier()
    ours.close()


def overflow(rank: Rank) -> str:
    """The words of the error. What ran behind the failed dispatch touched nothing outside."""
    ours = all_to_all(rank, 8, num_recv_rows=16)
    mine = part(whole(rank, 8, "biases"), rank, 8, ours)
    mine.topk_idx.fill_(0)

    def call() -> None:
        mine.run()  # on a GPU the backward pass is the first to know, or the next call
        torch.cuda.synchronize()
        ours.check()

    with pytest.raises(MegaMoEError) as error:
        call()
    rank.barrier()
    ours.reset()
    mine.topk_idx.fill_(-1)
    assert (mine() == 0).all()
    rank.barrier()
    ours.close()
    return str(error.value)


def check_overflow(messages: list[str]) -> None:
    for words in messages:
        assert "rank 0 would get" in words
        assert "max_recv_rows is 16" in words


@pytest.mark.gpu
def test_ranks_make_what_one_rank_makes(run_ranks: RunRanks) -> None:
    run_ranks(Place.GPUS, ALL, parts_of_one_rank, 160)


@pytest.mark.gpu
def test_a_graph_sees_other_routing_and_weights(run_ranks: RunRanks) -> None:
    run_ranks(Place.GPUS, ALL, graph_sees_other_routing, 64)


@pytest.mark.gpu
def test_overflow_is_an_error_on_every_rank(run_ranks: RunRanks) -> None:
    check_overflow(run_ranks(Place.GPUS, ALL, overflow))


@pytest.mark.slow
def test_the_same_in_the_emulator(run_ranks: RunRanks) -> None:
    run_ranks(Place.CPU, 2, parts_of_one_rank, 10)
    check_overflow(run_ranks(Place.CPU, 2, overflow))
