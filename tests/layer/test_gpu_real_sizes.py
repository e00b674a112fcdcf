"""The layers of published models at their real sizes, up to 8192 tokens per rank: some tokens of
every rank beside the reference, and the tokens that every expert received."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deep_moe
from benchmarks.problem import reference_sample
from deep_moe.activations import Swiglu
from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.targets import target_of
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.comparison import Comparison, compare
from deep_moe.trial.real_size import rank_layer, rank_tokens
from tests.layer import routing
from tests.layer.conftest import ALL, RunRanks
from tests.layer.kernels import compile_all, gpu_config, gpu_has_pair
from tests.layer.rank_layer import make_buffer
from tests.layer.rank_pool import Place, Rank
from tests.pairs import formats, usual_pairs

pytestmark = pytest.mark.gpu

# Of one model all formats; more would take minutes.
MODELS = [
    *(("deepseek-v4-flash", pair) for pair in usual_pairs("sm_90a")),
    ("deepseek-v4-pro", "mxfp4"),
]
MAX_TOKENS = 8192
CLAMP = 10.0
NUM_CHECKED = 12  # tokens of each rank
# Tokens of rank 0, of which others bring fewer, and how they are routed.
CALLS = (
    (1, "uniform"),
    (100, "uniform"),
    (1024, "zipf"),
    (2048, "one-expert"),
    (MAX_TOKENS, "uniform"),
)


def counts(num_tokens: int, num_ranks: int) -> list[int]:
    return [num_tokens - (num_tokens * (rank % 3)) // 4 for rank in range(num_ranks)]


def make_shape(model: str, pair: str, num_ranks: int) -> MoEShape:
    shape = preset_shape(model, num_ranks=num_ranks, num_max_tokens_per_rank=MAX_TOKENS)
    return replace(shape, **formats(pair))


def call_a_model(rank: Rank, model: str, pair: str) -> list[tuple[bool, Comparison, bool]]:
    """Of each call: is it good, by how much, and did the experts receive what was sent."""
    shape = make_shape(model, pair, rank.num_ranks)
    on_target = target_of(rank.arch).weights_of(**formats(pair))
    layer = rank_layer(shape, rank.idx, 0, rank.device, on_target.scale_block)
    weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, **formats(pair))
    del layer
    buffer = make_buffer(rank, shape)
    outcomes = []
    for call_idx, (num_tokens, route) in enumerate(CALLS):
        own = counts(num_tokens, rank.num_ranks)[rank.idx]
        tokens = rank_tokens(shape, own, rank.idx, call_idx, rank.device, route)
        fill_inputs(buffer, tokens)
        y = torch.full((own, shape.hidden), torch.nan, dtype=torch.bfloat16, device=rank.device)
        stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32, device=rank.device)
        deep_moe.mega_moe(y, weights, buffer, stats, activation_clamp=CLAMP)
        rank.synchronize()
        buffer.raise_if_failed()

        sent = rank.gather(routing.received(shape, [tokens]).cpu())
        received = torch.stack(sent).sum(dim=0).view(rank.num_ranks, -1)[rank.idx]
        rows = torch.linspace(0, own - 1, min(NUM_CHECKED, own), device=rank.device).long()
        comparison = compare(
            y[rows], reference_sample(shape, tokens, rows, 0, on_target, Swiglu(CLAMP))
        )
        outcomes.append(
            (
                comparison.is_right and not bool(y.isnan().any()),
                comparison,
                torch.equal(received.int(), stats.cpu()),
            )
        )
    rank.barrier()
    buffer.close()
    torch.cuda.empty_cache()
    return outcomes


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels of all calls."""
    configs = [
        gpu_config(make_shape(model, pair, num_ranks), own, activation_clamp=CLAMP)
        for model, pair in MODELS
        if gpu_has_pair(pair)
        for num_ranks in {1, torch.cuda.device_count()}
        for num_tokens, _ in CALLS
        for own in counts(num_tokens, num_ranks)
    ]
    compile_all(configs)


@pytest.mark.parametrize("num_ranks", [1, ALL], ids=["one_gpu", "all_gpus"])
@pytest.mark.parametrize(("model", "pair"), MODELS)
def test_models(run_ranks: RunRanks, compiled: None, model: str, pair: str, num_ranks: int) -> None:
    if not gpu_has_pair(pair):
        pytest.skip(f"this GPU's kernel takes no {pair}")
    for rank, outcomes in enumerate(run_ranks(Place.GPUS, num_ranks, call_a_model, model, pair)):
        for (num_tokens, _), (is_good, comparison, is_count_right) in zip(
            CALLS, outcomes, strict=True
        ):
            assert is_good, (rank, num_tokens, comparison)
            assert is_count_right, (rank, num_tokens)
