"""A random layer and tokens, made on a rank's own device, for timing at real sizes. Any expert can
be made again by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_moe.biases.per_expert import MegaMoEBiases, transform_biases_for_mega_moe
from deep_moe.formats.sizes import SCALE_GROUP
from deep_moe.heuristics import MoEShape
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights

from .synthetic import Layer, Tokens, quantize_tokens, random_biases

# uniform: every expert is as likely as any other. zipf: the n-th most popular expert is 1/n times
# as likely as the first. one-expert: every token names the same expert, and others at random.
ROUTINGS = ("uniform", "zipf", "one-expert")
_CERTAIN = 1e6  # beyond any difference of Gumbel noise


def expert_layer(
    shape: MoEShape,
    expert_idx: int,
    seed: int,
    device: torch.device,
    scale_block: tuple[int, int] = SCALE_GROUP,
) -> Layer:
    """Random weights of one expert, the same on every rank. scale_block: rows and values along K
    that share a scale."""
    generator = torch.Generator(device).manual_seed(1_000_003 * seed + expert_idx)
    weights = weight_format(shape.weights)

    def linear(num_rows: int, num_columns: int, num_matrices: int) -> LayerWeights:
        return weights.random(num_rows, num_columns, device, generator, scale_block, num_matrices)

    l1 = linear(shape.num_l1_rows, shape.hidden, shape.num_l1_matrices)
    return Layer(l1, linear(shape.hidden, shape.intermediate_hidden, 1))


def rank_layer(
    shape: MoEShape,
    rank: int,
    seed: int,
    device: torch.device,
    scale_block: tuple[int, int] = SCALE_GROUP,
) -> Layer:
    """Weights and biases of a rank's experts, then of the shared ones."""
    weights = _rank_weights(shape, rank, seed, device, scale_block)
    biases = _rank_biases(shape, rank, seed, device)
    return Layer(*weights, shape.num_shared_experts, *(biases or ()))


def _rank_weights(
    shape: MoEShape, rank: int, seed: int, device: torch.device, scale_block: tuple[int, int]
) -> tuple[LayerWeights, LayerWeights]:
    num_local = shape.num_experts_per_rank
    own = [rank * num_local + i for i in range(num_local)]
    own += range(shape.num_experts, shape.num_experts + shape.num_shared_experts)
    experts = [expert_layer(shape, idx, seed, device, scale_block) for idx in own]

    def stacked(layers: list[LayerWeights]) -> LayerWeights:
        return LayerWeights(*map(torch.cat, zip(*layers, strict=True)))

    return stacked([e.l1 for e in experts]), stacked([e.l2 for e in experts])


def _rank_biases(
    shape: MoEShape, rank: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not shape.biases:
        return None
    generator = torch.Generator(device).manual_seed(1_000_003 * seed - rank - 1)
    biases = random_biases(shape, shape.num_experts_per_rank, generator)
    if not shape.num_shared_experts:
        return biases
    # The same on every rank.
    generator = torch.Generator(device).manual_seed(1_000_003 * seed - 1_000_000)
    of_shared = random_biases(shape, shape.num_shared_experts, generator)
    l1_bias, l2_bias = (torch.cat(parts) for parts in zip(biases, of_shared, strict=True))
    return l1_bias, l2_bias


@dataclass(frozen=True)
class LayerMadeByRanks:
    """`rank_layer` of every rank, in place of a `Layer` that one process would have to make and
    hold: each rank makes its part when it is asked for, on its own device.

    device: a type of devices, "cuda" for each rank's current GPU.
    """

    shape: MoEShape
    seed: int
    device: str
    scale_block: tuple[int, int] = SCALE_GROUP

    def of_rank(self, rank: int, num_ranks: int) -> tuple[LayerWeights, LayerWeights]:
        """As `Layer.of_rank`."""
        assert num_ranks == self.shape.num_ranks
        device = torch.device(self.device)
        return _rank_weights(self.shape, rank, self.seed, device, self.scale_block)

    def biases_of_rank(
        self, rank: int, shape: MoEShape, arch: str | None = None
    ) -> MegaMoEBiases | None:
        """As `Layer.biases_of_rank`."""
        biases = _rank_biases(shape, rank, self.seed, torch.device(self.device))
        if biases is None:
            return None
        return transform_biases_for_mega_moe(
            *biases, arch, weights=shape.weights, token_format=shape.token_format
        )


def rank_tokens(
    shape: MoEShape,
    num_tokens: int,
    rank: int,
    seed: int,
    device: torch.device,
    routing: str = "uniform",
) -> Tokens:
    """Normally distributed tokens of a rank, each to different experts. routing: one of ROUTINGS,
    with the same popular experts on all ranks."""
    generator = torch.Generator(device).manual_seed(1_000_003 * seed + 7919 * rank + num_tokens)
    x = torch.randn(num_tokens, shape.hidden, device=device, generator=generator)
    order = torch.rand(num_tokens, shape.num_experts, device=device, generator=generator)
    weights = torch.rand(num_tokens, shape.num_topk, device=device, generator=generator) + 0.1
    # The largest of log p + Gumbel noise are a draw without replacement.
    noise = -(-order.clamp(min=1e-30).log()).log()
    likelihood_log = _likelihood_log(shape.num_experts, routing, seed).to(device)
    return Tokens(
        *quantize_tokens(x, shape.tokens),
        (likelihood_log + noise).topk(shape.num_topk, dim=1).indices,
        weights / weights.sum(dim=1, keepdim=True),
    )


def _likelihood_log(num_experts: int, routing: str, seed: int) -> torch.Tensor:
    """Of each expert, up to a constant."""
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}; got {routing!r}")
    likelihood_log = torch.zeros(num_experts)
    by_popularity = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    if routing == "zipf":
        likelihood_log[by_popularity] = -torch.arange(1.0, num_experts + 1).log()
    elif routing == "one-expert":
        likelihood_log[by_popularity[0]] = _CERTAIN
    return likelihood_log
