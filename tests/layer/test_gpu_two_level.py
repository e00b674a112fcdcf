"""A layer over two domains of one GPU each, NCCL between them, or over one domain. The same runs
over gloo in the emulator, so that the tests are right themselves."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_moe.errors import ForeignTokensError, LostDomainError
from deep_moe.heuristics import MoEShape
from deep_moe.split.domain_groups import DomainGroups, make_domain_groups
from deep_moe.split.two_level import TwoLevelMoE
from deep_moe.targets import target_of
from deep_moe.trial.calls import model_inputs, rank_operands
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import Layer, Tokens, exact_layer, exact_tokens
from deep_moe.trial.two_level import two_level_bounds
from tests.layer.conftest import RunRanks
from tests.layer.rank_pool import Place, Rank, RankPool
from tests.pairs import formats

SHAPE = MoEShape(2, 8, 3, 256, 128, 20)
NUM_TOKENS = (17, 6)
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"num_chunks": 3},
    {"exact_sizes": True},
    {"num_chunks": 2, "exact_sizes": True, "num_max_foreign_tokens": 40},
)
OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "fp8": {**formats("fp8")},
    "bf16_biases": {**formats("bf16"), "biases": True},
    "shared_experts": {"num_shared_experts": 2},
}
NUM_REPLAYS = 200
TIMEOUT_S = 3.0


def make(rank: Rank, shape: MoEShape, **arguments: Any) -> TwoLevelMoE:
    groups = DomainGroups(None, None) if rank.num_ranks == 1 else make_domain_groups(2)
    return TwoLevelMoE(
        groups.domain,
        groups.cross,
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
        weights=shape.weights,
        token_format=shape.token_format,
        biases=shape.biases,
        num_shared_experts=shape.num_shared_experts,
        device=rank.device,
        **arguments,
    )


def layer_of(rank: Rank, shape: MoEShape) -> Layer:
    on_target = target_of(rank.arch).weights_of(shape.weights, shape.token_format)
    bits = on_target.numerics.sum_bits
    return exact_layer(shape, sum_bits=bits, scale_block=on_target.scale_block)


# x, ids and weights.
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def own_tokens(rank: Rank, shape: MoEShape, seed: int = 0) -> tuple[Routed, Tokens]:
    """x, ids and weights on the rank's device, and what the layer makes of them."""
    count = NUM_TOKENS[(rank.idx + seed) % 2]
    x, tokens = model_inputs(exact_tokens(shape, count, seed=2 * seed + rank.idx))
    device = rank.device
    return (x.to(device), tokens.topk_idx.to(device), tokens.topk_weights.to(device)), tokens


def options(rank: Rank) -> dict[str, Any]:
    return {} if rank.is_gpu else {"arch": rank.arch, "num_sms": 2, "checked": False}


def is_exact(rank: Rank, shape: MoEShape, layer: Layer, y: torch.Tensor, tokens: Tokens) -> bool:
    numerics = target_of(rank.arch).weights_of(shape.weights, shape.token_format).numerics
    how: dict[str, Any] = {"numerics": numerics, "sum_bits": numerics.sum_bits}
    bounds = two_level_bounds(shape, rank.num_ranks, rank.idx, layer, tokens, **how)
    return compare(y.cpu(), bounds.y).is_exact


def every_bit(rank: Rank, shape: MoEShape, arguments: dict[str, Any]) -> None:
    """Three calls in a row, none of which waits for the one before."""
    layer = layer_of(rank, shape)
    weights, biases = rank_operands(shape, layer, rank.idx, rank.device, rank.arch)
    moe = make(rank, shape, **arguments)
    calls = [own_tokens(rank, shape, seed) for seed in range(3)]
    more = {**biases, **options(rank)}
    ys = [moe.call(*given, weights, **more) for given, _ in calls]
    moe.check()
    for y, (_, tokens) in zip(ys, calls, strict=True):
        assert is_exact(rank, shape, layer, y, tokens)
    rank.barrier()
    moe.close()


def replays_differ(rank: Rank, shape: MoEShape, num_replays: int) -> int:
    """How many replays of a captured call gave other bits than calls outside; the tokens change."""
    layer = layer_of(rank, shape)
    weights, _ = rank_operands(shape, layer, rank.idx, rank.device, rank.arch)
    moe = make(rank, shape, num_chunks=2)
    # As many tokens on both ranks in each call, since a graph has one number.
    calls = []
    for seed in range(2):
        x, tokens = model_inputs(exact_tokens(shape, 9, seed=2 * seed + rank.idx))
        device = rank.device
        given = (x.to(device), tokens.topk_idx.to(device), tokens.topk_weights.to(device))
        calls.append(given)
    expected = [moe.call(*given, weights).clone() for given in calls for _ in range(2)][::2]
    moe.check()
    x, ids, weights_of_ids = calls[0]
    inputs = (x.clone(), ids.clone(), weights_of_ids.clone())
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's own thread looks at its events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = moe.call(*inputs, weights)
    num_different = 0
    for replay in range(num_replays):
        for tensor, own in zip(inputs, calls[replay % 2], strict=True):
            tensor.copy_(own)
        graph.replay()
        num_different += int(not torch.equal(y, expected[replay % 2]))
    moe.check()
    rank.barrier()
    del graph
    moe.close()
    return num_different


def too_many_tokens(rank: Rank) -> list[str]:
    """Rank 1 has three tokens for domain 0, which has room for two."""
    shape = SHAPE
    layer = layer_of(rank, shape)
    weights, _ = rank_operands(shape, layer, rank.idx, rank.device, rank.arch)
    x = torch.zeros(4, shape.hidden, dtype=torch.bfloat16, device=rank.device)
    routing_weights = torch.ones(4, shape.num_topk, device=rank.device)
    few = torch.full((4, shape.num_topk), -1, device=rank.device)
    few[:2, 0] = 4 * (1 - rank.idx)
    many = few.clone()
    many[:3, 0] = 0
    messages = []
    for exact_sizes in (False, True):
        moe = make(rank, shape, num_max_foreign_tokens=2, exact_sizes=exact_sizes)
        if rank.is_gpu and not exact_sizes:
            y = moe.call(x, many, routing_weights, weights)
            with pytest.raises(ForeignTokensError) as caught:
                moe.check()
            assert y.isnan().all()
        else:
            with pytest.raises(ForeignTokensError) as caught:
                moe.call(x, many, routing_weights, weights, **options(rank))
        messages.append(str(caught.value))
        assert (moe.call(x, few, routing_weights, weights, **options(rank)) == 0).all()
        moe.check()
        rank.barrier()
        moe.close()
    return messages


def lost_domain(rank: Rank) -> str:
    """Rank 1 does not call a second time."""
    layer = layer_of(rank, SHAPE)
    weights, _ = rank_operands(SHAPE, layer, rank.idx, rank.device, rank.arch)
    moe = make(rank, SHAPE, exact_sizes=True, timeout_s=TIMEOUT_S)
    given, _ = own_tokens(rank, SHAPE)
    # NCCL's first transport lets the host wait, for as long as NCCL likes.
    moe.call(*given, weights, **options(rank))
    moe.check()
    if rank.idx == 1:
        time.sleep(4 * TIMEOUT_S)  # whose group the other one waits in
        return ""
    with pytest.raises(LostDomainError) as caught:
        moe.call(*given, weights, **options(rank))
    return str(caught.value)


def check_messages(found: list[list[str]]) -> None:
    assert found[0] == found[1]
    fixed, exact = found[0]
    assert "rank 0 of domain 1 has 3 tokens for domain 0 in chunk 0" in fixed
    assert "rank 0 of domain 0 is sent 3 tokens by other domains in chunk 0" in exact


def check_lost_domain(place: Place) -> None:
    """In processes of its own: on GPUs, NCCL goes on to wait."""
    pool = RankPool(2, place)
    try:
        message, _ = pool.run(lost_domain)
    finally:
        pool.close()
    assert "domain 1 is lost: its rank 0 does not answer" in message


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", MODES, ids=["fixed", "chunks", "exact", "exact_chunks"])
def test_every_bit(run_ranks: RunRanks, arguments: dict[str, Any]) -> None:
    run_ranks(Place.GPUS, 2, every_bit, SHAPE, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["mxfp4", "bf16"])
def test_a_gpu_alone_is_one_domain(run_ranks: RunRanks, weights: str) -> None:
    """With chunks, and in a graph."""
    shape = replace(SHAPE, num_ranks=1, **formats(weights))
    run_ranks(Place.GPUS, 1, every_bit, shape, {"num_chunks": 3})
    assert run_ranks(Place.GPUS, 1, replays_differ, shape, NUM_REPLAYS) == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", OTHER_LAYERS.values(), ids=OTHER_LAYERS)
def test_every_bit_of_other_layers(run_ranks: RunRanks, changes: dict[str, Any]) -> None:
    run_ranks(Place.GPUS, 2, every_bit, replace(SHAPE, **changes), {"num_chunks": 2})


@pytest.mark.gpu
def test_replays_of_a_graph(run_ranks: RunRanks) -> None:
    assert run_ranks(Place.GPUS, 2, replays_differ, SHAPE, NUM_REPLAYS) == [0, 0]


@pytest.mark.gpu
def test_too_many_foreign_tokens(run_ranks: RunRanks) -> None:
    check_messages(run_ranks(Place.GPUS, 2, too_many_tokens))


@pytest.mark.gpu
def test_a_lost_domain_is_named(run_ranks: RunRanks) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two domains need two GPUs")
    check_lost_domain(Place.GPUS)


@pytest.mark.slow
def test_the_same_in_the_emulator(run_ranks: RunRanks) -> None:
    run_ranks(Place.CPU, 1, every_bit, replace(SHAPE, num_ranks=1), MODES[1])
    run_ranks(Place.CPU, 2, every_bit, SHAPE, MODES[3])
    for changes in OTHER_LAYERS.values():
        run_ranks(Place.CPU, 2, every_bit, replace(SHAPE, **changes), {"num_chunks": 2})
    check_messages(run_ranks(Place.CPU, 2, too_many_tokens))
    check_lost_domain(Place.CPU)
