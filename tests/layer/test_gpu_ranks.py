"""One call on several GPUs, a process for each: results over the sizes and routings that a call may
have. The same cases run in the emulator, with fewer tokens, so that they are right themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of_device
from deep_moe.trial.calls import run_processes
from deep_moe.trial.comparison import Comparison, compare
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.layer import routing
from tests.layer.conftest import RunRanks
from tests.layer.kernels import compile_all, gpu_config, gpu_has_pair
from tests.layer.rank_layer import RankLayer
from tests.layer.rank_pool import MAX_RANKS, Place, Rank
from tests.pairs import formats, usual_pairs

NUM_RANKS = (1, 2, 3, 4, 8)
CPU_SCALE = 16  # so many times fewer tokens


@dataclass(frozen=True)
class Problem:
    """A layer and a call of it. experts: per rank. tokens: of rank r, entry r. pair: of formats."""

    name: str
    experts: int = 4
    topk: int = 4
    hidden: int = 512
    intermediate: int = 256
    tokens: tuple[int, ...] = (200, 0, 1, 77, 3, 200, 12, 64)
    routing: routing.Routing = routing.uniform
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    pair: str = "mxfp4"

    def counts(self, num_ranks: int, scale: int) -> list[int]:
        return [-(-count // scale) for count in self.tokens[:num_ranks]]

    def shape(self, num_ranks: int, scale: int = 1) -> MoEShape:
        return MoEShape(
            num_ranks=num_ranks,
            num_experts=self.experts * num_ranks,
            num_topk=self.topk,
            hidden=self.hidden,
            intermediate_hidden=self.intermediate,
            num_max_tokens_per_rank=max(*self.tokens, 1) // scale + 1,
            **formats(self.pair),
        )


PROBLEMS = (
    Problem("unequal", hidden=896, intermediate=512),
    Problem("few", hidden=896, intermediate=512, tokens=(3, 0, 1, 2, 1, 0, 0, 4)),
    Problem("none", tokens=(0,) * 8),
    Problem("one_sends", tokens=(40, 0, 0, 0, 0, 0, 0, 0)),
    Problem("topk_1", experts=3, topk=1, tokens=(33, 150, 8, 90, 1, 1, 1, 1)),
    Problem("topk_8", experts=16, topk=8, tokens=(130, 128, 7, 40, 130, 5, 6, 7)),
    Problem("topk_12", experts=12, topk=12, hidden=256, tokens=(64, 3, 50, 1, 9, 9, 9, 9)),
    Problem("one_per_rank", experts=1, topk=1, tokens=(300, 20, 100, 5, 1, 2, 3, 4)),
    Problem(
        "one_expert", topk=2, tokens=(700, 300, 9, 512, 3, 1, 0, 8), routing=routing.one_expert
    ),
    Problem(
        "zipf", experts=8, topk=6, tokens=(512, 400, 300, 200, 100, 9, 8, 7), routing=routing.zipf
    ),
    Problem("unused_slots", tokens=(150, 1, 64, 9, 3, 1, 0, 8), routing=routing.unused_slots),
    Problem("twice", tokens=(90, 41, 64, 9, 3, 1, 0, 8), routing=routing.same_expert_twice),
    Problem("odd_hidden", topk=2, hidden=5 * 128, intermediate=3 * 128, tokens=(99,) * 8),
    Problem("narrow", topk=2, hidden=128, intermediate=128, tokens=(99, 3) * 4),
    Problem("wide", experts=2, topk=2, hidden=7168, intermediate=256, tokens=(40, 9) * 4),
    Problem("clamp", tokens=(120, 33) * 4, options={"activation_clamp": 10.0}),
    Problem("precise_silu", tokens=(120, 33) * 4, options={"fast_math": False}),
)
OF_FORMATS = [
    Problem(pair.replace(" ", "_"), topk=3, hidden=896, intermediate=384, pair=pair)
    for pair in (*usual_pairs("sm_90a"), "fp8 x fp8_128")
    if pair != "mxfp4"
]
NAMES_OF_SKEWED = ("unequal", "one_expert", "zipf", "unused_slots", "twice")
SKEWED = [problem for problem in PROBLEMS if problem.name in NAMES_OF_SKEWED]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a problem."""

    comparison: Comparison
    stats: list[int]  # tokens that its experts received
    sent: list[int]  # tokens that it sent to each expert of the layer


def solve(rank: Rank, problem: Problem) -> list[Outcome]:
    """An exact layer, then a random one in the same buffer."""
    scale = 1 if rank.is_gpu else CPU_SCALE
    shape = problem.shape(rank.num_ranks, scale)
    num_tokens = problem.counts(rank.num_ranks, scale)[rank.idx]
    outcomes, buffer = [], None
    for exact in (True, False):
        layer = RankLayer(rank, shape, exact=exact, buffer=buffer)
        buffer = layer.buffer
        tokens = routing.make_tokens(
            shape, num_tokens, exact=exact, seed=rank.idx, routing=problem.routing
        )
        stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32, device=rank.device)
        comparison = layer.compare_call(
            tokens, cumulative_local_expert_recv_stats=stats, **problem.options
        )
        sent = routing.received(shape, [tokens])
        outcomes.append(
            Outcome(
                comparison,
                stats.tolist(),
                sent.tolist(),
            )
        )
    rank.barrier()  # no rank takes its memory away while another still reads it
    return outcomes


def check(problem: Problem, outcomes: list[list[Outcome]]) -> None:
    for exact, random in outcomes:
        assert exact.comparison.is_exact, (problem.name, exact.comparison)
        assert random.comparison.is_right, (problem.name, random.comparison)
    for of_ranks in zip(*outcomes, strict=True):
        sent = torch.tensor([outcome.sent for outcome in of_ranks]).sum(dim=0)
        assert [count for outcome in of_ranks for count in outcome.stats] == sent.tolist()


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels of the problems for the ranks that this machine has."""
    runs = [
        (problem, num_ranks)
        for num_ranks in NUM_RANKS
        if num_ranks <= torch.cuda.device_count()
        for problem in (*PROBLEMS, *OF_FORMATS)
        if gpu_has_pair(problem.pair)
    ]
    runs += [(problem, MAX_RANKS) for problem in SKEWED]
    compile_all(
        gpu_config(problem.shape(num_ranks), count, **problem.options)
        for problem, num_ranks in runs
        for count in problem.counts(num_ranks, 1)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("problem", [*PROBLEMS, *OF_FORMATS], ids=lambda problem: problem.name)
def test_results(run_ranks: RunRanks, compiled: None, problem: Problem, num_ranks: int) -> None:
    if not gpu_has_pair(problem.pair):
        pytest.skip(f"this GPU's kernel takes no {problem.pair}")
    check(problem, run_ranks(Place.GPUS, num_ranks, solve, problem))


@pytest.mark.gpu
@pytest.mark.parametrize("problem", SKEWED, ids=lambda problem: problem.name)
def test_eight_ranks_on_any_number_of_gpus(
    run_ranks: RunRanks, compiled: None, problem: Problem
) -> None:
    """Kernels of ranks that share a GPU take turns there, so every wait between ranks is long."""
    check(problem, run_ranks(Place.SHARED_GPUS, MAX_RANKS, solve, problem))


@pytest.mark.slow
@pytest.mark.parametrize("problem", [*SKEWED, *OF_FORMATS], ids=lambda problem: problem.name)
def test_results_in_the_emulator(run_ranks: RunRanks, problem: Problem) -> None:
    """Sizes are tried there in tests/kernels and test_matrix.py."""
    check(problem, run_ranks(Place.CPU, 2, solve, problem))


@pytest.mark.gpu
def test_processes_of_a_trial() -> None:
    """What `deep-moe run --device cuda` does."""
    num_ranks = min(torch.cuda.device_count(), 2)
    numerics = target_of_device(torch.device("cuda")).weights_of().numerics
    shape = Problem("trial").shape(num_ranks)
    layer = exact_layer(shape, sum_bits=numerics.sum_bits)
    tokens = [exact_tokens(shape, 20 - rank, seed=rank) for rank in range(num_ranks)]
    (outputs,) = run_processes(shape, layer, [tokens], device="cuda")
    for mine, output in zip(tokens, outputs, strict=True):
        inputs = (mine.x, mine.x_sf, mine.topk_idx, mine.topk_weights)
        expected = reference_mega_moe(*inputs, layer.l1, layer.l2, numerics=numerics)
        result = compare(output.y, expected)
        assert result.is_exact, result
    stats = torch.cat([output.stats for output in outputs])
    assert torch.equal(stats, routing.received(shape, tokens))
