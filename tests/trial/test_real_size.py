"""Made-up layers and tokens: every rank agrees on them, and routings are as skewed as they say."""

from dataclasses import replace

import pytest
import torch

from deep_moe.biases.per_expert import transform_biases_for_mega_moe
from deep_moe.heuristics import MoEShape
from deep_moe.trial.calls import run_emulated_ranks, run_processes
from deep_moe.trial.real_size import (
    ROUTINGS,
    LayerMadeByRanks,
    expert_layer,
    rank_layer,
    rank_tokens,
)
from deep_moe.trial.synthetic import Layer
from deep_moe.weights.layers import LayerWeights

SHAPE = MoEShape(2, 16, 3, 128, 128, 4000)
CPU = torch.device("cpu")


def counts(routing: str, rank: int = 0) -> torch.Tensor:
    tokens = rank_tokens(SHAPE, 4000, rank, 7, CPU, routing)
    return torch.bincount(tokens.topk_idx.flatten(), minlength=16)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_names_different_experts(routing: str):
    idx = rank_tokens(SHAPE, 500, 1, 7, CPU, routing).topk_idx
    assert idx.shape == (500, 3)
    assert all(len(set(row)) == 3 for row in idx.tolist())
    assert (int(idx.min()), int(idx.max())) == (0, 15)


def test_uniform_routing_fills_experts_alike():
    assert counts("uniform").float().std() < 2 * 750**0.5


def test_zipf_makes_the_nth_expert_1_nth_as_popular():
    """Of the first slot, which is a plain draw; later ones are without replacement."""
    idx = rank_tokens(SHAPE, 4000, 0, 7, CPU, "zipf").topk_idx[:, 0]
    popular = torch.bincount(idx, minlength=16).sort(descending=True).values
    expected = 4000 / torch.arange(1.0, 17) / (1 / torch.arange(1.0, 17)).sum()
    assert torch.allclose(popular.float(), expected, rtol=0.25, atol=15)
    assert counts("zipf").argmax() == counts("zipf", rank=1).argmax()  # the same on all ranks


def test_one_expert_is_named_by_every_token():
    for rank in range(2):
        named = counts("one-expert", rank)
        assert named.max() == 4000
        assert named.sum() == 3 * 4000
    assert counts("one-expert").argmax() == counts("one-expert", 1).argmax()


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="routing must be one of uniform, zipf, one-expert"):
        rank_tokens(SHAPE, 1, 0, 7, CPU, "random")


def test_a_ranks_experts_can_be_made_one_by_one():
    layer = rank_layer(SHAPE, 1, 3, CPU)
    again = expert_layer(SHAPE, 8 + 5, 3, CPU)
    assert torch.equal(layer.l1.weight[5], again.l1.weight[0])
    assert torch.equal(layer.l2.sf[5], again.l2.sf[0])
    assert not torch.equal(layer.l1.weight[5], layer.l1.weight[4])


@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("biases", [False, True])
def test_ranks_make_the_same_parts_by_themselves(num_shared: int, biases: bool):
    shape = replace(SHAPE, num_shared_experts=num_shared, biases=biases)
    made = LayerMadeByRanks(shape, 3, "cpu")
    for rank in range(2):
        layer = rank_layer(shape, rank, 3, CPU)
        for own, expected in zip(made.of_rank(rank, 2), (layer.l1, layer.l2), strict=True):
            assert torch.equal(own.weight, expected.weight)
            assert torch.equal(own.sf, expected.sf)
        own_biases = made.biases_of_rank(rank, shape, "sm_90a")
        if not biases:
            assert own_biases is None
            continue
        laid_out = transform_biases_for_mega_moe(
            layer.l1_bias, layer.l2_bias, "sm_90a", weights="mxfp4"
        )
        for own, expected in zip(own_biases, laid_out, strict=True):
            assert torch.equal(own, expected)


def test_processes_that_make_their_parts_compute_the_same():
    shape = MoEShape(2, 4, 2, 256, 128, 8)
    tokens = [rank_tokens(shape, count, rank, 5, CPU) for rank, count in enumerate((8, 3))]
    parts = [rank_layer(shape, rank, 5, CPU) for rank in range(2)]
    l1, l2 = (
        LayerWeights(*map(torch.cat, zip(*pairs, strict=True)))
        for pairs in ([part.l1 for part in parts], [part.l2 for part in parts])
    )
    made = LayerMadeByRanks(shape, 5, "cpu")
    options = {"arch": "sm_90a", "num_sms": 2}
    (expected,) = run_emulated_ranks(shape, Layer(l1, l2), [tokens], **options)
    (found,) = run_processes(shape, made, [tokens], device="cpu", **options)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own.y.view(torch.int16), other.y.view(torch.int16))
