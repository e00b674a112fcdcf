"""Which ranks of all domains take part in a layer's calls."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deep_moe.heuristics.shape import require_int

from .domain_groups import DomainPlace


class DomainMask:
    """One rank's. What it takes is the same on all ranks that take part.

    there: numbers of the ranks that the layer's groups lead to, by default all. Others are left
    out. needs_groups: why ranks of the groups cannot be left out, if they cannot. may_return:
    whether ranks that were left out may take part again without a reset.

    Attributes:
        ranks: those that are left out, among those of all domains.
        inside: int32 [ranks of the domain], as `masked_ranks` of the calls inside it, or None if no
            rank of the domain was left out since the last reset.
    """

    def __init__(
        self,
        place: DomainPlace,
        device: torch.device,
        needs_groups: str | None,
        *,
        may_return: bool = False,
    ) -> None:
        self._place = place
        self._device = device
        self._needs_groups = needs_groups
        self._may_return = may_return
        self.rejoin(frozenset(range(place.num_all_ranks)))

    def rejoin(self, there: frozenset[int]) -> None:
        """Behind a reset: all that the groups lead to take part."""
        self._missing = frozenset(range(self._place.num_all_ranks)) - there
        self.ranks: frozenset[int] = frozenset()
        self.inside: torch.Tensor | None = None
        self._leave_out(self._missing)

    def leave_out(self, ranks: Iterable[int]) -> None:
        """These, and those that the groups do not lead to."""
        place, num_all = self._place, self._place.num_all_ranks
        masked = set(self._missing)
        for rank in ranks:
            require_int("ranks", rank, f"0 to {num_all - 1} each")
            if not 0 <= rank < num_all or rank == place.number:
                raise ValueError(
                    f"ranks must be other ranks, 0 to {num_all - 1} but not {place.number}; "
                    f"got {rank}"
                )
            masked.add(rank)
        in_groups = sorted(masked - self._missing)
        if in_groups and self._needs_groups is not None:
            raise ValueError(
                f"ranks must be outside of the layer's groups, because {self._needs_groups}: call "
                f"reset(groups) with groups without them first; got {in_groups}"
            )
        returning = sorted(self.ranks - masked)
        if returning and not self._may_return:
            raise ValueError(
                "ranks must hold those that were left out before, since ranks that missed calls "
                f"take part again only behind reset(); {returning} are missing"
            )
        self._leave_out(frozenset(masked))

    def _leave_out(self, ranks: frozenset[int]) -> None:
        self.ranks = ranks
        place = self._place
        if self.ranks_inside and self.inside is None:
            self.inside = torch.zeros(place.num_ranks, dtype=torch.int32, device=self._device)
        if self.inside is not None:
            out = [int(rank in self.ranks_inside) for rank in range(place.num_ranks)]
            self.inside.copy_(torch.tensor(out, dtype=torch.int32))

    @property
    def ranks_inside(self) -> list[int]:
        """Of the own domain, by their numbers there."""
        return [r % self._place.num_ranks for r in sorted(self.ranks) if self._is_here(r)]

    @property
    def domains(self) -> list[int]:
        """Other domains whose rank of the own number is left out: nothing goes there."""
        own = self._place.rank
        return [
            rank // self._place.num_ranks
            for rank in sorted(self.ranks)
            if rank % self._place.num_ranks == own
        ]

    def _is_here(self, rank: int) -> bool:
        return rank // self._place.num_ranks == self._place.domain
