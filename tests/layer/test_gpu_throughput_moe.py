"""The layer for many tokens on GPUs: every bit, graphs with other tokens, too many rows, traces.
The same runs in the emulator, so that the tests are right themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deep_moe import ThroughputMoE
from deep_moe.errors import MegaMoEError
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.targets.target import TargetWeights
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.calls import model_inputs, rank_operands
from deep_moe.trial.comparison import compare
from deep_moe.trial.split_trace import newest_call, summary
from deep_moe.trial.synthetic import Layer, Tokens, exact_layer, exact_tokens
from deep_moe.trial.trace import record
from tests.layer.conftest import ALL, RunRanks
from tests.layer.rank_pool import Place, Rank

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName

NUM_REPLAYS = 200
MAX_TOKENS = 160
# %globaltimer may count in steps of a microsecond.
CLOCK_NS = 2000


def shape_of(rank: Rank, weights: WeightsName = "mxfp4", biases: bool = False) -> MoEShape:
    num_experts = 4 * rank.num_ranks
    return MoEShape(
        rank.num_ranks, num_experts, 3, 512, 256, MAX_TOKENS, weights=weights, biases=biases
    )


def on_target(rank: Rank, shape: MoEShape) -> TargetWeights:
    return target_of(rank.arch).weights_of(shape.weights, shape.token_format)


def layer_of(rank: Rank, shape: MoEShape) -> Layer:
    target = on_target(rank, shape)
    return exact_layer(shape, sum_bits=target.numerics.sum_bits, scale_block=target.scale_block)


def make(rank: Rank, shape: MoEShape, **more: Any) -> ThroughputMoE:
    on_cpu: dict[str, Any] = {} if rank.is_gpu else {"arch": rank.arch, "num_sms": 2}
    return ThroughputMoE(
        rank.group,
        shape.num_max_tokens_per_rank,
        shape.hidden,
        shape.intermediate_hidden,
        shape.num_experts,
        shape.num_topk,
        weights=shape.weights,
        token_format=shape.token_format,
        biases=shape.biases,
        device=rank.device,
        **on_cpu,
        **more,
    )


# x, ids and weights.
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def own_tokens(rank: Rank, shape: MoEShape, num_tokens: int, seed: int) -> tuple[Routed, Tokens]:
    """x, ids and weights on the rank's device, and what the layer makes of them."""
    made = exact_tokens(shape, num_tokens, seed=rank.num_ranks * seed + rank.idx)
    x, tokens = model_inputs(made)
    device = rank.device
    return (x.to(device), tokens.topk_idx.to(device), tokens.topk_weights.to(device)), tokens


def is_exact(rank: Rank, shape: MoEShape, layer: Layer, y: torch.Tensor, tokens: Tokens) -> bool:
    numerics = on_target(rank, shape).numerics
    bounds = reference_bounds(
        *layer.operands(tokens),
        weights_in_combine=True,
        numerics=numerics,
        sum_bits=numerics.sum_bits,
        **layer.biases,
    )
    return compare(y.cpu(), bounds.y).is_exact


def every_bit(rank: Rank, most: int, weights: WeightsName, biases: bool) -> None:
    """Three calls in a row, none of which waits for the one before."""
    shape = shape_of(rank, weights, biases)
    layer = layer_of(rank, shape)
    operands, own_biases = rank_operands(shape, layer, rank.idx, rank.device, rank.arch)
    moe = make(rank, shape)
    counts = (most, 0, most // 2)
    calls = [own_tokens(rank, shape, counts[(seed + rank.idx) % 3], seed) for seed in range(3)]
    ys = [moe(*given, operands, **own_biases) for given, _ in calls]
    rank.synchronize()
    moe.check()
    for y, (_, tokens) in zip(ys, calls, strict=True):
        assert is_exact(rank, shape, layer, y, tokens)
    rank.barrier()
    moe.close()


def replays_differ(rank: Rank, num_replays: int) -> int:
    """How many replays of a captured call gave other bits than calls outside; the tokens change."""
    shape = shape_of(rank)
    operands, _ = rank_operands(shape, layer_of(rank, shape), rank.idx, rank.device, rank.arch)
    moe = make(rank, shape)
    calls = [own_tokens(rank, shape, MAX_TOKENS, seed)[0] for seed in range(2)]
    expected = [moe(*given, operands).clone() for given in calls]
    rank.synchronize()
    x, ids, weights = calls[0]
    inputs = (x.clone(), ids.clone(), weights.clone())
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's own thread looks at its events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = moe(*inputs, operands)
    num_different = torch.zeros((), dtype=torch.int64, device=rank.device)
    for replay in range(num_replays):
        for tensor, own in zip(inputs, calls[replay % 2], strict=True):
            tensor.copy_(own)
        graph.replay()
        num_different += (y != expected[replay % 2]).any()
    rank.synchronize()
    moe.check()
    rank.barrier()
    del graph
    moe.close()
    return int(num_different)


def too_many_rows(rank: Rank) -> str:
    """What a rank says of a call in which the last rank would get too many rows: the kernels behind
    the dispatch end by themselves, and behind a reset the layer is as before."""
    shape = shape_of(rank)
    layer = layer_of(rank, shape)
    operands, _ = rank_operands(shape, layer, rank.idx, rank.device, rank.arch)
    moe = make(rank, shape, max_recv_rows=24 * rank.num_ranks)
    given, tokens = own_tokens(rank, shape, 8, 0)
    x, ids, weights = given
    x, weights = x.repeat(2, 1), weights.repeat(2, 1)
    ids = torch.full_like(ids.repeat(2, 1), shape.num_experts - 1)

    def call() -> None:
        moe(x, ids, weights, operands)
        rank.synchronize()
        moe.check()

    with pytest.raises(MegaMoEError) as error:
        call()
    moe.reset()
    y = moe(*given, operands)
    rank.synchronize()
    moe.check()
    assert is_exact(rank, shape, layer, y, tokens)
    rank.barrier()
    moe.close()
    return str(error.value)


def check_too_many_rows(messages: list[str]) -> None:
    num_ranks = len(messages)
    text = f"rank {num_ranks - 1} would get {16 * 3 * num_ranks} rows"
    assert all(text in message for message in messages), messages


def traced(rank: Rank, most: int) -> dict[str, float]:
    """Microseconds of the kernels of a call, which begin one behind the other."""
    shape = replace(shape_of(rank), num_max_tokens_per_rank=most)
    operands, _ = rank_operands(shape, layer_of(rank, shape), rank.idx, rank.device, rank.arch)
    moe = make(rank, shape, enable_profiling=True)
    given, _ = own_tokens(rank, shape, most, 0)
    with record(moe.experts.work_space) as (recorder,):
        for _ in range(2):
            moe(*given, operands)
        call = newest_call(moe.all_to_all, recorder)
    moe.check()
    spans = call.experts.spans
    assert max(phase.end_ns for phase in call.dispatch) <= spans["start_ns"].min() + CLOCK_NS
    assert spans["end_ns"].max() <= min(phase.start_ns for phase in call.combine) + CLOCK_NS
    rank.barrier()
    moe.close()
    return summary([call])["kernels"]


def check_traces(found: list[dict[str, float]]) -> None:
    for kernels_us in found:
        assert all(us > 0 for us in kernels_us.values()), kernels_us


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
@pytest.mark.parametrize(
    ("weights", "biases"), [("mxfp4", False), ("fp8", True), ("bf16", False)], ids=str
)
def test_every_bit(run_ranks: RunRanks, num_ranks: int, weights: WeightsName, biases: bool) -> None:
    run_ranks(Place.GPUS, num_ranks, every_bit, MAX_TOKENS, weights, biases)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
def test_replays_of_a_graph(run_ranks: RunRanks, num_ranks: int) -> None:
    assert set(run_ranks(Place.GPUS, num_ranks, replays_differ, NUM_REPLAYS)) == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
def test_too_many_rows(run_ranks: RunRanks, num_ranks: int) -> None:
    check_too_many_rows(run_ranks(Place.GPUS, num_ranks, too_many_rows))


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
def test_kernels_are_traced_one_behind_the_other(run_ranks: RunRanks, num_ranks: int) -> None:
    check_traces(run_ranks(Place.GPUS, num_ranks, traced, MAX_TOKENS))


@pytest.mark.slow
def test_the_same_in_the_emulator(run_ranks: RunRanks) -> None:
    run_ranks(Place.CPU, 2, every_bit, 10, "fp8", True)
    check_too_many_rows(run_ranks(Place.CPU, 2, too_many_rows))
    check_traces(run_ranks(Place.CPU, 2, traced, 10))
