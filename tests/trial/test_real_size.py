"""Made-up layers and tokens: every rank agrees on them, and routings are as skewed as they say."""

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.real_size import ROUTINGS, expert_layer, rank_layer, rank_tokens

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
