"""One call on several GPUs, a process for each: symmetric memory over NVLink, and its results."""

import pytest
import torch

from deep_moe.comparison import compare
from deep_moe.heuristics import MoEShape
from deep_moe.reference import NUMERICS, reference_mega_moe
from deep_moe.synthetic import exact_layer, exact_tokens, random_layer, random_tokens
from deep_moe.trial import run_processes
from deep_moe.weights import weight_arch

pytestmark = pytest.mark.gpu

NUM_RANKS = (2, 4, 8)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
@pytest.mark.parametrize("num_tokens", [3, 200], ids=lambda n: f"{n}_tokens")
def test_ranks_with_unequal_tokens(num_ranks: int, exact: bool, num_tokens: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"{num_ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    numerics = NUMERICS[weight_arch(torch.device("cuda"))]
    shape = MoEShape(
        num_ranks=num_ranks,
        num_experts=4 * num_ranks,
        num_topk=4,
        hidden=896,
        intermediate_hidden=512,
        num_max_tokens_per_rank=num_tokens,
    )
    counts = [num_tokens, 0, 1, *range(2, num_ranks)][:num_ranks]
    if exact:
        layer = exact_layer(shape, sum_bits=numerics.sum_bits)
        tokens = [exact_tokens(shape, count, seed=rank) for rank, count in enumerate(counts)]
    else:
        layer = random_layer(shape)
        tokens = [
            random_tokens(shape, count, seed=rank, num_unused_slots=1)
            for rank, count in enumerate(counts)
        ]
    clamp = None if exact else 10.0
    outputs = run_processes(shape, layer, tokens, device="cuda", activation_clamp=clamp)
    received = torch.zeros(shape.num_experts, dtype=torch.int32)
    for mine, output in zip(tokens, outputs, strict=True):
        expected = reference_mega_moe(
            mine.x,
            mine.x_sf,
            mine.topk_idx,
            mine.topk_weights,
            layer.l1,
            layer.l2,
            activation_clamp=clamp,
            numerics=numerics,
        )
        result = compare(output.y, expected)
        assert result.is_good(exact=exact, sum_bits=numerics.sum_bits), result
        named = mine.topk_idx[mine.topk_idx >= 0]
        received += torch.bincount(named, minlength=shape.num_experts).int()
    assert torch.equal(torch.cat([output.stats for output in outputs]), received)
