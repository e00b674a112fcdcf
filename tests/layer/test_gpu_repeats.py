"""A thousand calls between ranks, each of which takes other inputs every time: the same inputs give
the same bits, whatever the other ranks bring, and the control words do not drift."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.comparison import Comparison
from deep_moe.trial.synthetic import Tokens
from tests.layer import routing
from tests.layer.conftest import ALL, RunRanks
from tests.layer.kernels import compile_all, gpu_config
from tests.layer.rank_layer import RankLayer, bits
from tests.layer.rank_pool import MAX_RANKS, Place, Rank

NUM_CALLS = 1000
CALLS_PER_PERIOD = 4  # phases of rank barriers return after two
TOKENS = (96, 0, 1, 40, 77, 96, 13, 64)  # of the inputs that a rank takes in turn
CPU_TOKENS = (9, 0, 1, 4)
ROUTINGS = (routing.uniform, routing.zipf, routing.unused_slots, routing.one_expert)


def make_shape(num_ranks: int) -> MoEShape:
    return MoEShape(
        num_ranks=num_ranks,
        num_experts=6 * num_ranks,
        num_topk=4,
        hidden=512,
        intermediate_hidden=256,
        num_max_tokens_per_rank=max(TOKENS),
    )


def make_inputs(layer: RankLayer) -> list[Tokens]:
    """On the rank's device, other ones on every rank."""
    rank = layer.rank
    inputs = []
    for i, num_tokens in enumerate(TOKENS if rank.is_gpu else CPU_TOKENS):
        tokens = routing.make_tokens(
            layer.shape,
            num_tokens,
            exact=layer.exact,
            seed=100 * rank.idx + i,
            routing=ROUTINGS[(i + rank.idx) % len(ROUTINGS)],
        )
        tensors = (tokens.x, tokens.x_sf, tokens.topk_idx, tokens.topk_weights)
        inputs.append(Tokens(*(tensor.to(rank.device) for tensor in tensors)))
    return inputs


@dataclass(frozen=True)
class Repeats:
    """What one rank saw."""

    comparisons: list[Comparison]  # of the first results
    num_different: int  # later calls whose result was not bit for bit the first one
    is_control_as_new: bool
    stats: list[int]  # tokens that its experts received
    sent: list[int]  # tokens that it sent to each expert of the layer


class Caller:
    """Calls a layer with one of its inputs after the other, or replays a graph for each."""

    def __init__(self, layer: RankLayer, inputs: list[Tokens], *, in_graphs: bool) -> None:
        self.layer = layer
        self.inputs = inputs
        device = layer.rank.device
        self.stats = torch.zeros(layer.shape.num_experts_per_rank, dtype=torch.int32, device=device)
        self.ys = [layer.new_y(tokens.num_tokens) for tokens in inputs]
        self.graphs = [self.capture(y) for y in self.ys] if in_graphs else None

    def launch(self, y: torch.Tensor) -> None:
        self.layer.launch(y, cumulative_local_expert_recv_stats=self.stats)

    def capture(self, y: torch.Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own thread looks at its events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.launch(y)
        return graph

    def __call__(self, i: int) -> torch.Tensor:
        """The result, which the next call with this input overwrites; does not wait for it."""
        fill_inputs(self.layer.buffer, self.inputs[i])
        y = self.ys[i].fill_(torch.nan)
        if self.graphs is None:
            self.launch(y)
        else:
            self.graphs[i].replay()
        return y


def turns(rank: Rank, num_inputs: int, num_calls: int) -> list[int]:
    """Which input each call takes: all of them once, then at random, on every rank on its own."""
    generator = torch.Generator().manual_seed(rank.idx)
    later = torch.randint(num_inputs, (num_calls - num_inputs,), generator=generator)
    return [*range(num_inputs), *later.tolist()]


def is_control_as_new(layer: RankLayer) -> bool:
    """After whole periods: all that survives a call is zero. Of the count of rank barriers, which
    goes on for ever, the two low bits are."""
    layout = layer.buffer.layout
    words = layer.buffer.memory.tensor[: layout.mark("zeroed_end")].clone()
    counter = layout["rank_barrier_counter"]
    words[counter.offset : counter.end].view(torch.int32).bitwise_and_(3)
    return not words.any()


def repeat(rank: Rank, num_calls: int, in_graphs: bool) -> Repeats:
    layer = RankLayer(rank, make_shape(rank.num_ranks), exact=False)
    inputs = make_inputs(layer)
    # Kernels are compiled and loaded before the first one that waits for another rank runs: loading
    # may wait for all that runs on the GPU.
    for tokens in inputs:
        layer.call(tokens)
    call = Caller(layer, inputs, in_graphs=in_graphs)
    order = turns(rank, len(inputs), num_calls)
    firsts: list[torch.Tensor] = []
    num_different = torch.zeros((), dtype=torch.int64, device=rank.device)
    for i in order:
        y = call(i)
        if len(firsts) == i:
            firsts.append(y.clone())
        num_different += (bits(y) != bits(firsts[i])).any()
    layer.finish()
    comparisons = [layer.compare(y, x) for y, x in zip(firsts, inputs, strict=True)]
    sent = torch.stack([routing.received(layer.shape, [tokens]).cpu() for tokens in inputs])
    repeats = Repeats(
        comparisons,
        int(num_different),
        is_control_as_new(layer),
        call.stats.tolist(),
        sent[order].sum(dim=0).tolist(),
    )
    rank.barrier()
    return repeats


def check(repeats: list[Repeats]) -> None:
    for rank_idx, seen in enumerate(repeats):
        assert all(c.is_right for c in seen.comparisons), (rank_idx, seen.comparisons)
        assert seen.num_different == 0, rank_idx
        assert seen.is_control_as_new, rank_idx
    received = [count for seen in repeats for count in seen.stats]
    assert received == torch.tensor([seen.sent for seen in repeats]).sum(dim=0).tolist()


@pytest.fixture(scope="module")
def compiled() -> None:
    shapes = [make_shape(num_ranks) for num_ranks in {1, torch.cuda.device_count(), MAX_RANKS}]
    compile_all(gpu_config(shape, n) for shape in shapes for n in TOKENS)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
@pytest.mark.parametrize("in_graphs", [False, True], ids=["calls", "graphs"])
def test_a_thousand_calls(
    run_ranks: RunRanks, compiled: None, num_ranks: int, in_graphs: bool
) -> None:
    """B17, B24: graphs of different sizes are replayed together on different ranks."""
    check(run_ranks(Place.GPUS, num_ranks, repeat, NUM_CALLS, in_graphs))


@pytest.mark.gpu
def test_calls_of_eight_ranks_on_any_number_of_gpus(run_ranks: RunRanks, compiled: None) -> None:
    check(run_ranks(Place.SHARED_GPUS, MAX_RANKS, repeat, 10 * CALLS_PER_PERIOD, True))


@pytest.mark.slow
def test_calls_in_the_emulator(run_ranks: RunRanks) -> None:
    check(run_ranks(Place.CPU, 2, repeat, 2 * CALLS_PER_PERIOD, False))
