"""Which expert lies at which place."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from deep_moe.fused.checks import require_type
from deep_moe.heuristics.shape import require_int


@dataclass(frozen=True)
class ExpertPlacement:
    """Experts by places, of which rank r owns the r-th part.

    Args:
        experts: the expert of each place; every expert has one at least.
        num_ranks: ranks that own the places.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not allowed; the text names it.
    """

    experts: tuple[int, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        require_int("num_ranks", self.num_ranks, "at least 1")
        require_type("experts", self.experts, tuple, "a tuple of int")
        if self.num_ranks < 1 or not self.experts or len(self.experts) % self.num_ranks:
            raise ValueError(
                f"num_ranks must divide the {len(self.experts)} places; got {self.num_ranks}"
            )
        if set(self.experts) != set(range(self.num_experts)):
            raise ValueError(
                f"experts must name each of 0 to {self.num_experts - 1}; got {self.experts}"
            )

    @property
    def num_experts(self) -> int:
        return max(self.experts) + 1

    @property
    def num_places_per_rank(self) -> int:
        return len(self.experts) // self.num_ranks

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Of each expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(self.experts):
            found[expert].append(place)
        return tuple(map(tuple, found))

    def expert_map(self, num_copies: int | None = None) -> torch.Tensor:
        """As `prepare_inputs` takes it: int64 [experts, copies], -1 behind an expert's last one.

        Args:
            num_copies: columns, by default as many as some expert has copies. A table whose memory
                a CUDA graph reads has the same number for all placements.

        Raises:
            ValueError: some expert has more copies.
        """
        most = max(map(len, self.places))
        num_copies = most if num_copies is None else require_int("num_copies", num_copies, "an int")
        if num_copies < most:
            raise ValueError(f"num_copies must be at least {most}; got {num_copies}")
        rows = [[*own, *[-1] * (num_copies - len(own))] for own in self.places]
        return torch.tensor(rows, dtype=torch.int64)

    def loads(self, load: Sequence[float] | torch.Tensor) -> list[float]:
        """Of each rank, where copies of an expert share its load.

        Args:
            load: of each expert.
        """
        of_experts = _checked(load, self.num_experts)
        totals = [0.0] * self.num_ranks
        for place, expert in enumerate(self.experts):
            share = of_experts[expert] / len(self.places[expert])
            totals[place // self.num_places_per_rank] += share
        return totals


def place_experts(
    load: Sequence[float] | torch.Tensor,
    num_places: int,
    num_ranks: int,
    *,
    before: ExpertPlacement | None = None,
) -> ExpertPlacement:
    """Places for experts, so that ranks get about the same load.

    The expert whose copies have the most to do gets one more, until there are no places left; then
    the copies with the most to do go first, each to the rank that has the least so far.

    Args:
        load: of each expert, say the slots that named it: floats, or a tensor on the CPU.
        num_places: of all ranks together, a multiple of num_ranks, from the number of experts up to
            a copy of each on every rank.
        num_ranks: ranks that own the places.
        before: where experts lie now. What a rank is given anyway stays in its place, and ranks
            keep as many experts as they can.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.

    >>> place_experts([5, 1, 1, 1], 6, 2).experts
    (0, 1, 2, 0, 1, 3)
    """
    loads = _checked(load)
    num_experts = len(loads)
    require_int("num_ranks", num_ranks, "at least 1")
    allowed = f"a multiple of num_ranks ({num_ranks}), {num_experts} to {num_experts * num_ranks}"
    require_int("num_places", num_places, allowed)
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1; got {num_ranks}")
    if num_places % num_ranks or not num_experts <= num_places <= num_experts * num_ranks:
        raise ValueError(f"num_places must be {allowed}; got {num_places}")
    if before is not None:
        require_type("before", before, ExpertPlacement, "an ExpertPlacement or None")
        if (len(before.experts), before.num_ranks) != (num_places, num_ranks):
            raise ValueError(
                f"before must have {num_places} places on {num_ranks} ranks; got "
                f"{len(before.experts)} on {before.num_ranks}"
            )
    copies = _numbers_of_copies(loads, num_places, num_ranks)
    groups = _packed(loads, copies, num_places // num_ranks, num_ranks)
    if before is None:
        return ExpertPlacement(tuple(e for group in groups for e in sorted(group)), num_ranks)
    return _near(groups, before)


def _checked(load: Sequence[float] | torch.Tensor, num_experts: int | None = None) -> list[float]:
    if isinstance(load, torch.Tensor):
        if load.device.type != "cpu" or load.ndim != 1:
            raise ValueError(
                f"load must be a tensor [experts] on the CPU; got {tuple(load.shape)} on "
                f"{load.device}"
            )
        load = load.tolist()
    require_type("load", load, Sequence, "a tensor or a list of numbers")
    loads = [float(value) for value in load]
    if not loads or not all(value >= 0 and math.isfinite(value) for value in loads):
        raise ValueError(f"load must have numbers of at least 0, one at least; got {load}")
    if num_experts is not None and len(loads) != num_experts:
        raise ValueError(f"load must have {num_experts} numbers; got {len(loads)}")
    return loads


def _numbers_of_copies(loads: list[float], num_places: int, num_ranks: int) -> list[int]:
    """Of each expert, at most one for each rank."""
    copies = [1] * len(loads)
    most_first = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(most_first)
    for _ in range(num_places - len(loads)):
        while True:
            _, expert = heapq.heappop(most_first)
            if copies[expert] < num_ranks:
                break
        copies[expert] += 1
        heapq.heappush(most_first, (-loads[expert] / copies[expert], expert))
    return copies


def _packed(
    loads: list[float], copies: list[int], num_places_per_rank: int, num_ranks: int
) -> list[list[int]]:
    """Experts of each rank. A rank has an expert twice only if no other has room."""
    shares = sorted(
        ((-loads[expert] / number, expert) for expert, number in enumerate(copies)),
    )
    groups: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for share, expert in shares:
        for _ in range(copies[expert]):
            rank = min(
                (r for r in range(num_ranks) if len(groups[r]) < num_places_per_rank),
                key=lambda r: (expert in groups[r], totals[r], r),
            )
            groups[rank].append(expert)
            totals[rank] -= share
    return groups


def _near(groups: list[list[int]], before: ExpertPlacement) -> ExpertPlacement:
    """Each group on the rank that has most of it, and each expert where that rank has it."""
    size, num_ranks = before.num_places_per_rank, before.num_ranks
    held = [list(before.experts[r * size : (r + 1) * size]) for r in range(num_ranks)]
    pairs = sorted(
        (-len(set(group) & set(held[rank])), number, rank)
        for number, group in enumerate(groups)
        for rank in range(num_ranks)
    )
    rank_of: dict[int, int] = {}
    for _, number, rank in pairs:
        if number not in rank_of and rank not in rank_of.values():
            rank_of[number] = rank
    experts: list[int] = [-1] * len(before.experts)
    for number, group in enumerate(groups):
        rank, new = rank_of[number], []
        for expert in sorted(group):
            kept = [i for i, e in enumerate(held[rank]) if e == expert]
            free = [i for i in kept if experts[rank * size + i] < 0]
            if free:
                experts[rank * size + free[0]] = expert
            else:
                new.append(expert)
        for i in range(size):
            if experts[rank * size + i] < 0:
                experts[rank * size + i] = new.pop(0)
    return ExpertPlacement(tuple(experts), num_ranks)
