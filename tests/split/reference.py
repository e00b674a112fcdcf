"""What a dispatch and a combine have to give, in plain PyTorch, one token at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from deep_moe.formats.block_scaled import pack_ue8m0, quantize_e4m3_ue8m0
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.heuristics.low_latency import LowLatencyShape
from deep_moe.split.handle import Dispatched
from deep_moe.split.split_layer import ROW_DTYPES


def quantized(
    x: torch.Tensor, token_format: str, group_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens as they travel."""
    if token_format == "bf16":
        return x, None
    if token_format == "mxfp8":
        return quantize_e4m3_ue8m0(x.float())
    values, scales = quantize_e4m3_float(
        x, powers_of_two=token_format != "fp8_128", group_size=group_size
    )
    if token_format == "fp8_128_ue8m0":
        return values, pack_ue8m0((scales.log2().int() + 127).to(torch.uint8))
    return values, scales


def ids_in_domains(
    topk_idxs: Sequence[torch.Tensor],
    num_experts_per_rank: int,
    num_domains: int,
    masked: Collection[int],
) -> list[torch.Tensor]:
    """topk_idxs of ranks in domains: slots count that somebody can carry. Not of masked ranks, and
    of other domains only where the rank of the own number is there."""
    num_ranks = len(topk_idxs) // num_domains
    found = []
    for rank, topk_idx in enumerate(topk_idxs):
        owner = topk_idx // num_experts_per_rank
        domain, number = owner // num_ranks, rank % num_ranks
        relay = domain * num_ranks + number
        is_lost = torch.zeros_like(topk_idx, dtype=torch.bool)
        for other in masked:
            is_lost |= (owner == other) | ((relay == other) & (domain != rank // num_ranks))
        is_lost |= torch.tensor(rank in masked)
        found.append(topk_idx.where((topk_idx >= 0) & ~is_lost, -1))
    return found


def used_experts(
    shape: LowLatencyShape, slots: Sequence[int], masked: Collection[int] = ()
) -> list[tuple[int, int]]:
    """(slot, expert) of each slot that counts."""
    per_rank = shape.num_experts_per_rank
    return [
        (slot, expert)
        for slot, expert in enumerate(slots)
        if 0 <= expert < shape.num_experts and expert // per_rank not in masked
    ]


@dataclass
class Row:
    source_rank: int
    token: int
    slot: int


def rows_of_expert(
    shape: LowLatencyShape,
    topk_idxs: Sequence[torch.Tensor],
    expert: int,
    masked: Collection[int] = (),
) -> list[Row]:
    """What an expert gets, in order."""
    rows = []
    for rank, topk_idx in enumerate(topk_idxs):
        if rank in masked:
            continue
        for token, slots in enumerate(topk_idx.tolist()):
            named = [slot for slot, e in used_experts(shape, slots, masked) if e == expert]
            if named:
                rows.append(Row(rank, token, named[0]))
    return rows


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Equal exactly if all bits are."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check_dispatched(
    shape: LowLatencyShape,
    result: Dispatched,
    rank: int,
    xs: Sequence[torch.Tensor],
    topk_idxs: Sequence[torch.Tensor],
    masked: Collection[int] = (),
) -> None:
    """Every bit of what a rank received that means something."""
    tokens = [quantized(x, shape.token_format, shape.group_size) for x in xs]
    for local in range(shape.num_experts_per_rank):
        expert = rank * shape.num_experts_per_rank + local
        rows = rows_of_expert(shape, topk_idxs, expert, masked)
        assert int(result.recv_count[local]) == len(rows)
        sources = [row.source_rank for row in rows]
        for source in range(shape.num_ranks):
            packed = int(result.layout_range[local, source])
            assert packed & 0xFFFFFFFF == sources.count(source)
            assert packed >> 32 == sum(other < source for other in sources)
        for i, row in enumerate(rows):
            values, scales = tokens[row.source_rank]
            assert int(result.src_info[local, i]) == row.token
            assert torch.equal(bits(result.recv_x[local, i]), bits(values[row.token]))
            if scales is None:
                assert result.scales is None
            else:
                assert result.scales is not None
                assert torch.equal(bits(result.scales[local, i]), bits(scales[row.token]))


def expected_out(
    shape: LowLatencyShape,
    rank: int,
    topk_idxs: Sequence[torch.Tensor],
    topk_weights: torch.Tensor,
    ys: Sequence[torch.Tensor],
    masked: Collection[int] = (),
) -> torch.Tensor:
    """A rank's output. ys: each rank's rows."""
    place = {}
    for expert in range(shape.num_experts):
        for i, row in enumerate(rows_of_expert(shape, topk_idxs, expert, masked)):
            place[row.source_rank, row.token, expert] = i
    topk_idx = topk_idxs[rank]
    out = torch.zeros(topk_idx.shape[0], shape.hidden)
    for token, slots in enumerate(topk_idx.tolist()):
        for slot, expert in used_experts(shape, slots, masked):
            owner, local = divmod(expert, shape.num_experts_per_rank)
            y = ys[owner][local, place[rank, token, expert]].float()
            out[token] = out[token] + y * topk_weights[token, slot]
    return out.to(ROW_DTYPES[shape.dtype])


@dataclass
class Inputs:
    """Of one call, each a list with an entry per rank."""

    xs: list[torch.Tensor]
    topk_idxs: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    ys: list[torch.Tensor]


def random_inputs(
    shape: LowLatencyShape,
    num_tokens: Sequence[int],
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.int64,
    unused: float = 0.2,
) -> Inputs:
    """unused: the part of slots that name nothing. A token may name an expert in several."""
    generator = torch.Generator().manual_seed(seed)
    inputs = Inputs([], [], [], [])
    for count in num_tokens:
        slots = (count, shape.num_topk)
        magnitude = torch.exp(4 * torch.randn((count, shape.hidden), generator=generator))
        sign = torch.randn((count, shape.hidden), generator=generator).sign()
        idx = torch.randint(0, shape.num_experts, slots, generator=generator)
        idx = idx.where(torch.rand(slots, generator=generator) >= unused, -1)
        rows = (shape.num_experts_per_rank, shape.num_rows_per_expert, shape.hidden)
        rows_dtype = ROW_DTYPES[shape.dtype]
        inputs.xs.append((sign * magnitude).to(rows_dtype))
        inputs.topk_idxs.append(idx.to(dtype))
        inputs.topk_weights.append(torch.rand(slots, generator=generator))
        inputs.ys.append(torch.randn(rows, generator=generator).to(rows_dtype))
    return inputs
