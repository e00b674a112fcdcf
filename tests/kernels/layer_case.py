"""One layer on emulated ranks beside its reference: what the kernel tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_moe.comparison import Comparison, compare
from deep_moe.emulated_ranks import EmulatedRanks
from deep_moe.heuristics import MoEShape
from deep_moe.reference import NUMERICS, reference_mega_moe
from deep_moe.synthetic import Layer, Tokens
from deep_moe.weights import transform_weights_for_mega_moe


class LayerCase:
    """The ranks of one layer with their weights; `call` runs the kernel once on all of them."""

    def __init__(self, shape: MoEShape, layer: Layer, *, arch: str = "sm_100a") -> None:
        self.shape = shape
        self.layer = layer
        self.arch = arch
        self.ranks = EmulatedRanks(
            shape.num_ranks,
            shape.num_experts,
            shape.num_max_tokens_per_rank,
            shape.num_topk,
            shape.hidden,
            shape.intermediate_hidden,
        )
        self.weights = [
            transform_weights_for_mega_moe(*layer.of_rank(rank, shape.num_ranks), arch=arch)
            for rank in range(shape.num_ranks)
        ]

    def call(self, tokens: Sequence[Tokens], **options: Any) -> list[torch.Tensor]:
        """Each rank's y. It is filled with NaN before, so that a row left out is noticed."""
        ys = []
        for buffer, mine in zip(self.ranks.buffers, tokens, strict=True):
            n = mine.num_tokens
            buffer.x[:n].copy_(mine.x)
            buffer.x_sf[:n].copy_(mine.x_sf)
            buffer.topk_idx[:n].copy_(mine.topk_idx)
            buffer.topk_weights[:n].copy_(mine.topk_weights)
            ys.append(torch.full((n, self.shape.hidden), torch.nan, dtype=torch.bfloat16))
        self.ranks.call(ys, self.weights, arch=self.arch, **options)
        return ys

    def expected(
        self, tokens: Sequence[Tokens], *, activation_clamp: float | None = None
    ) -> list[torch.Tensor]:
        return [
            reference_mega_moe(
                mine.x,
                mine.x_sf,
                mine.topk_idx,
                mine.topk_weights,
                self.layer.l1,
                self.layer.l2,
                activation_clamp=activation_clamp,
                numerics=NUMERICS[self.arch],
            )
            for mine in tokens
        ]

    def compare_call(
        self, tokens: Sequence[Tokens], *, activation_clamp: float | None = None, **options: Any
    ) -> list[Comparison]:
        """Call, and each rank's distance to the reference."""
        ys = self.call(tokens, activation_clamp=activation_clamp, **options)
        expected = self.expected(tokens, activation_clamp=activation_clamp)
        return [compare(y, e) for y, e in zip(ys, expected, strict=True)]
