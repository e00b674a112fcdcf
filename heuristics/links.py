"""What a call moves over the links between ranks, beside what they carry in the time that it has.

Routing is taken to be uniform, and all ranks to have as many tokens: then each sends as much as it
receives, in every phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deep_moe.weights import weight_format

from .shape import MoEShape

LINEAR2_SHARE = 1 / 3  # of a layer's products and weights


@dataclass(frozen=True)
class ChipRates:
    """What a chip's kernel computes, reads of weights and stores to peers, per second."""

    flops: Mapping[str, float]  # by what tokens are
    weight_bytes: float
    link_bytes: float


@dataclass(frozen=True)
class LinkLoad:
    """One rank, one direction: bytes, microseconds that there are for them, and which part of what
    the link carries meanwhile they are. Above 1 the link decides."""

    phase: str
    num_bytes: int
    us: float
    share: float


def link_loads(shape: MoEShape, num_tokens: int, rates: ChipRates) -> tuple[LinkLoad, ...]:
    """Of a call with so many tokens per rank; none where there is one rank, or no token.

    >>> shape = MoEShape(4, 256, 6, 4096, 2048, 8192)
    >>> rates = ChipRates({"e4m3": 1.15e15, "bf16": 0.62e15}, 3.0e12, 335e9)
    >>> [(load.phase, round(load.share, 2)) for load in link_loads(shape, 8192, rates)]
    [('tokens', 0.22), ('results', 0.42), ('both', 0.64), ('results, by themselves', 1.26)]
    """
    if shape.num_ranks == 1 or num_tokens == 0:
        return ()
    tokens = shape.tokens
    num_away = num_tokens * shape.num_topk * (shape.num_ranks - 1) / shape.num_ranks
    scale_bytes = 4 * tokens.num_row_words(shape.hidden)
    token_bytes = num_away * (tokens.num_bytes(shape.hidden) + scale_bytes)
    result_bytes = num_away * shape.hidden * 2
    seconds = _call_seconds(shape, num_tokens, rates)
    return tuple(
        LinkLoad(phase, round(num_bytes), 1e6 * time, num_bytes / (time * rates.link_bytes))
        for phase, num_bytes, time in (
            ("tokens", token_bytes, seconds),
            ("results", result_bytes, seconds),
            ("both", token_bytes + result_bytes, seconds),
            # If all SMs did Linear2 at the same time, and Linear1 before.
            ("results, by themselves", result_bytes, LINEAR2_SHARE * seconds),
        )
    )


def _call_seconds(shape: MoEShape, num_tokens: int, rates: ChipRates) -> float:
    """Products or weights, whatever takes longer."""
    weights_per_expert = shape.num_weights_per_expert
    num_rows = num_tokens * (shape.num_topk + shape.num_shared_experts)
    expected = float(shape.expected_tokens_per_expert(num_tokens))
    num_read = shape.num_experts_per_rank * (1 - math.exp(-expected)) + shape.num_shared_experts
    weight_bytes = weight_format(shape.weights).bytes_per_value
    return max(
        2 * num_rows * weights_per_expert / rates.flops[shape.tokens.values],
        num_read * weights_per_expert * weight_bytes / rates.weight_bytes,
    )
