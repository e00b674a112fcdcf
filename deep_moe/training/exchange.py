"""Tokens to the ranks that own their experts, and rows back: over a process group of PyTorch's.

A slot is sent to its expert's rank, a row for each slot. What arrives lies by source rank, then by
slot there, so that it is in the same order in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from .rows import Rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Ways:
    """Where the slots of a call go. S: slots that this rank sends, N: that it receives.

    sent: S rows in the order in which they are sent, by owner, then by slot; its slot_of_row [S]
        has no padding, and its offs are unused. local_experts: int64 [N, 1]. send_sizes,
        recv_sizes: slots to and from each rank.
    """

    sent: Rows
    local_experts: torch.Tensor
    send_sizes: list[int]
    recv_sizes: list[int]


class Exchange(Protocol):
    """What the layer over several ranks asks of whatever carries rows. Every rank calls all of it,
    in the same order, also with nothing to send."""

    def find_ways(self, topk_idx: torch.Tensor, num_local_experts: int) -> Ways:
        """Of global ids: rank r owns experts r * num_local_experts and following. RuntimeError on
        all ranks if one would receive too much."""
        ...

    def send_rows(self, rows: torch.Tensor, ways: Ways) -> torch.Tensor:
        """[S, ...] in the order of `ways.sent` -> [N, ...]."""
        ...

    def return_rows(self, rows: torch.Tensor, ways: Ways) -> torch.Tensor:
        """The other way: [N, ...] -> [S, ...]."""
        ...


class ProcessGroupExchange:
    """By `all_to_all_single`, which takes its sizes from the host: it waits once for each call.

    max_recv_slots: the most that a rank may receive in a call; None for no bound.
    """

    def __init__(self, group: ProcessGroup, max_recv_slots: int | None) -> None:
        self._group = group
        self._max_recv_slots = max_recv_slots

    def find_ways(self, topk_idx: torch.Tensor, num_local_experts: int) -> Ways:
        num_ranks, rank = self._group.size(), self._group.rank()
        device = topk_idx.device
        experts = topk_idx.reshape(-1).long()
        is_used = (experts >= 0) & (experts < num_ranks * num_local_experts)
        owners = (experts // num_local_experts).where(is_used, num_ranks)
        order = owners.argsort(stable=True)
        counts = torch.zeros(num_ranks + 1, dtype=torch.int64, device=device)
        counts.scatter_add_(0, owners, torch.ones_like(owners))
        sizes = [torch.empty_like(counts[:-1]) for _ in range(num_ranks)]
        dist.all_gather(sizes, counts[:-1].contiguous(), group=self._group)
        sent: list[list[int]] = torch.stack(sizes).tolist()  # the host waits here
        self._check([sum(column) for column in zip(*sent, strict=True)])
        send_sizes = sent[rank]
        slots = order[: sum(send_sizes)]
        row_of_slot = torch.full_like(experts, -1)
        row_of_slot[slots] = torch.arange(len(slots), device=device)
        rows = Rows(
            torch.empty(0, dtype=torch.int32, device=device),
            row_of_slot.view(topk_idx.shape).int(),
            slots.int(),
        )
        ways = Ways(rows, experts, send_sizes, [sizes[rank] for sizes in sent])
        local = self.send_rows((experts % num_local_experts)[slots].unsqueeze(1), ways)
        return Ways(rows, local, send_sizes, ways.recv_sizes)

    def send_rows(self, rows: torch.Tensor, ways: Ways) -> torch.Tensor:
        return self._exchanged(rows, ways.send_sizes, ways.recv_sizes)

    def return_rows(self, rows: torch.Tensor, ways: Ways) -> torch.Tensor:
        return self._exchanged(rows, ways.recv_sizes, ways.send_sizes)

    def _exchanged(
        self, rows: torch.Tensor, send_sizes: list[int], recv_sizes: list[int]
    ) -> torch.Tensor:
        # As bytes, of which every backend knows how to send them.
        sent = rows.contiguous().view(torch.uint8)
        received = sent.new_empty(sum(recv_sizes), *sent.shape[1:])
        dist.all_to_all_single(received, sent, recv_sizes, send_sizes, group=self._group)
        return received.view(rows.dtype)

    def _check(self, received: list[int]) -> None:
        """Every rank knows what each would receive, and so all raise, or none."""
        bound = self._max_recv_slots
        if bound is None or max(received) <= bound:
            return
        rank = received.index(max(received))
        raise RuntimeError(
            f"rank {rank} would receive {received[rank]} slots, more than max_recv_slots "
            f"({bound}); nothing was sent"
        )
