"""What the throughput all-to-all has to give, in plain PyTorch, one slot at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from deep_moe.heuristics.throughput import ThroughputShape
from deep_moe.split.throughput import AllToAllHandle, Received

from .reference import bits, quantized


@dataclass
class Places:
    """Of one rank's experts. rows: (source rank, token, slot) by row, None for padding."""

    begin: list[int]
    count: list[int]
    rows: list[tuple[int, int, int] | None]

    @property
    def end(self) -> list[int]:
        return [*self.begin[1:], len(self.rows)]


def places_of(shape: ThroughputShape, topk_idxs: Sequence[torch.Tensor], rank: int) -> Places:
    """Rows by expert, source rank, token and slot, each expert aligned."""
    places = Places([], [], [])
    for local in range(shape.num_experts_per_rank):
        expert = rank * shape.num_experts_per_rank + local
        rows = [
            (source, token, slot)
            for source, topk_idx in enumerate(topk_idxs)
            for token, slots in enumerate(topk_idx.tolist())
            for slot, named in enumerate(slots)
            if named == expert
        ]
        places.begin.append(len(places.rows))
        places.count.append(len(rows))
        places.rows += rows
        places.rows += [None] * (-len(rows) % shape.expert_alignment)
    return places


def without_masked(
    shape: ThroughputShape, topk_idxs: Sequence[torch.Tensor], masked: Collection[int]
) -> list[torch.Tensor]:
    """topk_idxs as steps take them that leave these ranks out."""
    owners = torch.arange(shape.num_experts) // shape.num_experts_per_rank
    is_dead = torch.isin(owners, torch.tensor(sorted(masked), dtype=owners.dtype))
    return [
        ids[:0] if rank in masked else ids.where((ids < 0) | ~is_dead[ids], -1)
        for rank, ids in enumerate(topk_idxs)
    ]


def row_of_slot(
    shape: ThroughputShape, topk_idxs: Sequence[torch.Tensor]
) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(rank, row) of each used (source rank, token, slot)."""
    return {
        source: (rank, row)
        for rank in range(shape.num_ranks)
        for row, source in enumerate(places_of(shape, topk_idxs, rank).rows)
        if source is not None
    }


def check_received(
    shape: ThroughputShape,
    received: Received,
    rank: int,
    topk_idxs: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    *,
    token_format: str = "bf16",
    weights: Sequence[torch.Tensor] | None = None,
    factors: Sequence[torch.Tensor] | None = None,
) -> None:
    """Every bit of what a rank received, padding included. weights: that were sent along. factors:
    by which rows were multiplied."""
    places = places_of(shape, topk_idxs, rank)
    assert received.expert_begin.tolist() == places.begin
    assert received.expert_count.tolist() == places.count
    assert received.expert_end.tolist() == places.end
    assert int(received.num_rows) == len(places.rows)
    travelling = [quantized(x, token_format) for x in xs]
    assert (received.topk_weights is None) == (weights is None)
    for row, source in enumerate(places.rows):
        if source is None:
            for tensor in (received.x, received.x_sf, received.topk_weights):
                assert tensor is None or not bits(tensor[row : row + 1]).any()
            continue
        source_rank, token, slot = source
        values, scales = travelling[source_rank]
        expected = values[token]
        if factors is not None:
            expected = (factors[source_rank][token, slot] * expected.float()).bfloat16()
        assert torch.equal(bits(received.x[row]), bits(expected))
        if scales is None:
            assert received.x_sf is None
        else:
            assert received.x_sf is not None
            assert torch.equal(bits(received.x_sf[row]), bits(scales[token]))
        if weights is not None:
            assert received.topk_weights is not None
            assert received.topk_weights[row] == weights[source_rank][token, slot]


def expected_sums(
    shape: ThroughputShape,
    rank: int,
    topk_idxs: Sequence[torch.Tensor],
    ys: Sequence[torch.Tensor],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """A rank's output. ys: each rank's rows. weights: of this rank's slots."""
    places = row_of_slot(shape, topk_idxs)
    num_tokens = topk_idxs[rank].shape[0]
    out = torch.zeros(num_tokens, shape.hidden)
    for token in range(num_tokens):
        for slot in range(shape.num_topk):
            place = places.get((rank, token, slot))
            if place is None:
                continue
            owner, row = place
            weight = 1.0 if weights is None else weights[token, slot]
            out[token] = out[token] + weight * ys[owner][row].float()
    return out.bfloat16()


def expected_scalars(
    shape: ThroughputShape,
    rank: int,
    topk_idxs: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What `return_scalars` gives a rank. values: each rank's."""
    out = torch.zeros(topk_idxs[rank].shape[0], shape.num_topk)
    for (source, token, slot), (owner, row) in row_of_slot(shape, topk_idxs).items():
        if source == rank:
            out[token, slot] = values[owner][row]
    return out


@dataclass
class Inputs:
    """Of one call, each a list with an entry per rank."""

    xs: list[torch.Tensor]
    topk_idxs: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    ys: list[torch.Tensor]
    values: list[torch.Tensor]


def random_inputs(
    shape: ThroughputShape,
    num_tokens: Sequence[int],
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.int64,
    unused: float = 0.2,
) -> Inputs:
    """unused: the part of slots that name nothing. A token may name an expert in several."""
    generator = torch.Generator().manual_seed(seed)
    inputs = Inputs([], [], [], [], [])
    for count in num_tokens:
        slots = (count, shape.num_topk)
        magnitude = torch.exp(4 * torch.randn((count, shape.hidden), generator=generator))
        sign = torch.randn((count, shape.hidden), generator=generator).sign()
        idx = torch.randint(0, shape.num_experts, slots, generator=generator)
        idx = idx.where(torch.rand(slots, generator=generator) >= unused, -1)
        rows = (shape.max_recv_rows, shape.hidden)
        inputs.xs.append((sign * magnitude).bfloat16())
        inputs.topk_idxs.append(idx.to(dtype))
        inputs.topk_weights.append(torch.rand(slots, generator=generator))
        inputs.ys.append(torch.randn(rows, generator=generator).bfloat16())
        inputs.values.append(torch.randn(shape.max_recv_rows, generator=generator))
    return inputs


def handles_of(
    results: Sequence[tuple[Received, AllToAllHandle]],
) -> list[AllToAllHandle]:
    return [handle for _, handle in results]
