"""Tokens with the routings that real layers have and that random ones do not show."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Tokens, exact_tokens, random_tokens

Routing = Callable[[MoEShape, int, torch.Generator], torch.Tensor]


def uniform(shape: MoEShape, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Different experts, all equally likely."""
    chances = torch.ones(num_tokens, shape.num_experts)
    return _draw(chances, shape.num_topk, generator)


def zipf(shape: MoEShape, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Expert e is chosen 1 / (e + 1) times as often as expert 0: most work is on rank 0."""
    chances = 1 / torch.arange(1, shape.num_experts + 1).expand(num_tokens, -1)
    return _draw(chances, shape.num_topk, generator)


def one_expert(shape: MoEShape, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """All tokens to the last expert, by one slot at a random place; the other slots are unused."""
    topk_idx = torch.full((num_tokens, shape.num_topk), -1)
    slots = torch.randint(shape.num_topk, (num_tokens, 1), generator=generator)
    return topk_idx.scatter_(1, slots, shape.num_experts - 1)


def unused_slots(shape: MoEShape, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Each slot is unused with a chance of a half; some tokens go nowhere."""
    topk_idx = uniform(shape, num_tokens, generator)
    return topk_idx.where(torch.rand(topk_idx.shape, generator=generator) < 0.5, -1)


def same_expert_twice(shape: MoEShape, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Half of the tokens name one expert in all their slots."""
    topk_idx = uniform(shape, num_tokens, generator)
    topk_idx[::2] = topk_idx[::2, :1]
    return topk_idx


def _draw(chances: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` different columns of each row, at random with these relative chances."""
    # The smallest of exponentially distributed waiting times.
    times = torch.rand(chances.shape, generator=generator).clamp(min=1e-7).log().neg() / chances
    return times.topk(count, dim=1, largest=False).indices


def make_tokens(
    shape: MoEShape, num_tokens: int, *, exact: bool, seed: int, routing: Routing = uniform
) -> Tokens:
    """As `exact_tokens` or `random_tokens`, with another routing."""
    tokens = (exact_tokens if exact else random_tokens)(shape, num_tokens, seed=seed)
    topk_idx = routing(shape, num_tokens, torch.Generator().manual_seed(seed + 1000))
    return Tokens(tokens.x, tokens.x_sf, topk_idx, tokens.topk_weights)


def received(shape: MoEShape, tokens: list[Tokens]) -> torch.Tensor:
    """Tokens that each expert of the layer is sent by all ranks together."""
    named = torch.cat([own.topk_idx.flatten() for own in tokens])
    return torch.bincount(named[named >= 0], minlength=shape.num_experts).int()
