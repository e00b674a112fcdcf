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


@dataclass(frozen=True)
class WorkPerByte:
    """Operations of the products for each byte that leaves a rank over links, and for how many the
    chip's products take as long as its links do: with more, products can hide the links."""

    flops: float
    flops_to_hide_links: float

    @property
    def hides_links(self) -> bool:
        return self.flops >= self.flops_to_hide_links


def work_per_byte(shape: MoEShape, rates: ChipRates) -> WorkPerByte | None:
    """Of a slot of a token, whose number cancels out; None where there is one rank.

    6 * hidden * intermediate operations per slot, and, but for scales and slots of the own rank, a
    byte per value there and two back: so never less than 2 * intermediate.

    >>> shape = MoEShape(8, 384, 6, 7168, 3072, 8192)
    >>> rates = ChipRates({"e4m3": 4.0e15, "bf16": 2.0e15}, 7e12, 700e9)
    >>> found = work_per_byte(shape, rates)
    >>> round(found.flops), round(found.flops_to_hide_links), found.hides_links
    (6949, 5714, True)
    """
    if shape.num_ranks == 1:
        return None
    tokens, hidden = shape.tokens, shape.hidden
    row_bytes = tokens.num_bytes(hidden) + 4 * tokens.num_row_words(hidden) + 2 * hidden
    bytes_per_slot = row_bytes * (shape.num_ranks - 1) / shape.num_ranks
    slots = (shape.num_topk + shape.num_shared_experts) / shape.num_topk  # shared ones stay
    flops = 2 * shape.num_weights_per_expert * slots / bytes_per_slot
    return WorkPerByte(flops, rates.flops[tokens.values] / rates.link_bytes)


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
