"""Weights of experts, from the places where they are to those where they shall be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from deep_moe.fused.buffer import ranks_of
from deep_moe.fused.checks import require_type

from .placement import ExpertPlacement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Move(NamedTuple):
    """Places of all ranks."""

    source: int
    target: int


def move_experts(
    tensors: Sequence[torch.Tensor],
    before: ExpertPlacement,
    after: ExpertPlacement,
    group: ProcessGroup | None = None,
) -> int:
    """Write each expert that has another place into it, in the same memory, so that captured CUDA
    graphs read it. How many of this rank's places changed.

    On the current stream, between two calls of the layer; `expert_map` changes there, too. It takes
    memory for this rank's changed experts of one tensor.

    Args:
        tensors: of this rank, [local places, ...] each: `weights.tensors`, and biases if there are
            some. What lies behind the places, as shared experts do, stays.
        before: where experts are.
        after: where they shall be, of as many places and ranks.
        group: ranks that own the places; all of them call this, with the same placements. None for
            a single rank.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    for name, placement in {"before": before, "after": after}.items():
        require_type(name, placement, ExpertPlacement, "an ExpertPlacement")
    num_ranks = ranks_of(group)
    sizes = {len(p.experts) for p in (before, after)}, {p.num_ranks for p in (before, after)}
    if len(sizes[0]) > 1 or sizes[1] != {num_ranks} or before.num_experts != after.num_experts:
        raise ValueError(
            f"before and after must have as many experts and places, on the {num_ranks} ranks of "
            f"group; got {before} and {after}"
        )
    num_local = before.num_places_per_rank
    for tensor in tensors:
        require_type("tensors", tensor, torch.Tensor, "tensors")
        if tensor.ndim < 1 or tensor.shape[0] < num_local:
            raise ValueError(
                f"tensors must be [local places ({num_local}), ...]; got {tuple(tensor.shape)}"
            )
    rank = 0 if group is None else dist.get_rank(group)
    moves = _moves(before, after)
    with torch.no_grad():
        for tensor in tensors:
            _move(tensor, moves, rank, num_local, group)
    return sum(move.target // num_local == rank for move in moves)


def _moves(before: ExpertPlacement, after: ExpertPlacement) -> list[_Move]:
    """The same on all ranks: from the own rank if it has the expert, else from the ranks that have
    it in turn."""
    size = before.num_places_per_rank
    moves, turn = [], 0
    for target, expert in enumerate(after.experts):
        if before.experts[target] == expert:
            continue
        held = before.places[expert]
        here = [place for place in held if place // size == target // size]
        moves.append(_Move(here[0] if here else held[turn % len(held)], target))
        turn += not here
    return moves


def _move(
    tensor: torch.Tensor,
    moves: list[_Move],
    rank: int,
    num_local: int,
    group: ProcessGroup | None,
) -> None:
    """Everything is read before anything is written."""
    new: list[tuple[int, torch.Tensor]] = []
    messages = []
    for move in moves:
        (source_rank, source), (target_rank, target) = (divmod(place, num_local) for place in move)
        if source_rank == rank:
            row = tensor[source].clone(memory_format=torch.contiguous_format)
            if target_rank == rank:
                new.append((target, row))
            else:
                messages.append(
                    dist.P2POp(dist.isend, _bytes(row), group=group, group_peer=target_rank)
                )
        elif target_rank == rank:
            row = torch.empty_like(tensor[target], memory_format=torch.contiguous_format)
            new.append((target, row))
            messages.append(
                dist.P2POp(dist.irecv, _bytes(row), group=group, group_peer=source_rank)
            )
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    for target, row in new:
        tensor[target].copy_(row)


def _bytes(row: torch.Tensor) -> torch.Tensor:
    return row.view(-1).view(torch.uint8)
