"""Rows between ranks by a process group of PyTorch's: over any network, sizes from the host.

A slot is sent to its expert's rank, one row for each slot. What arrives lies by source rank, then
by slot, so that the order is the same in every run. Each arrived row is a token with one slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .quantized import QuantizedColumns
from .rows import Rows
from .steps import Steps
from .ways import LocalWays, routed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ProcessGroupWays:
    """S: slots that this rank sends, N: that it receives.

    sent: S rows in the order in which they are sent, by owner, then by slot; its slot_of_row [S]
    has no padding, and its offs are unused. send_sizes, recv_sizes: slots to and from each rank.
    local: from the received slots to the experts' rows.
    """

    group: ProcessGroup
    sent: Rows
    send_sizes: list[int]
    recv_sizes: list[int]
    local: LocalWays

    @property
    def rows(self) -> Rows:
        return self.local.rows

    def receive(self, tokens: torch.Tensor) -> torch.Tensor:
        slots = self.sent.slot_of_row.long()
        return self._sent(tokens[slots // self.sent.num_topk])

    def gather(self, received: torch.Tensor, *, rounds_to_mxfp8: bool = False) -> torch.Tensor:
        return self.local.gather(received, rounds_to_mxfp8=rounds_to_mxfp8)

    def gather_columns(self, received: torch.Tensor) -> QuantizedColumns:
        return self.local.gather_columns(received)

    def receive_weights(self, topk_weights: torch.Tensor) -> torch.Tensor:
        slots = self.sent.slot_of_row.long()
        return self._sent(topk_weights.reshape(-1)[slots].unsqueeze(1))

    def scatter(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        returned = self._returned(self.local.scatter(first, second, bias=bias))
        return self.local.steps.scatter(returned, None, self.sent, topk_weights=topk_weights)

    def return_weights(self, values: torch.Tensor) -> torch.Tensor:
        returned = values.new_zeros(self.sent.row_of_slot.shape)
        slots = self.sent.slot_of_row.long()
        returned.view(-1)[slots] = self._returned(values).squeeze(1)
        return returned

    def _sent(self, rows: torch.Tensor) -> torch.Tensor:
        """[S, ...] in the order of `sent` -> [N, ...]."""
        return _exchanged(rows, self.send_sizes, self.recv_sizes, self.group)

    def _returned(self, rows: torch.Tensor) -> torch.Tensor:
        """The other way: [N, ...] -> [S, ...]."""
        return _exchanged(rows, self.recv_sizes, self.send_sizes, self.group)


class ProcessGroupExchange:
    """By `all_to_all_single`, which takes its sizes from the host: it waits once for each call.

    max_recv_slots: the most that a rank may receive in a call; None for no bound. If one would
    receive more, all ranks get a RuntimeError.
    """

    def __init__(self, group: ProcessGroup, max_recv_slots: int | None) -> None:
        self._group = group
        self._max_recv_slots = max_recv_slots

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_local_experts: int,
        steps: Steps,
    ) -> tuple[ProcessGroupWays, torch.Tensor]:
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
        send_sizes, recv_sizes = sent[rank], [sizes[rank] for sizes in sent]
        slots = order[: sum(send_sizes)]
        row_of_slot = torch.full_like(experts, -1)
        row_of_slot[slots] = torch.arange(len(slots), device=device)
        no_offs = torch.empty(0, dtype=torch.int32, device=device)
        rows = Rows(no_offs, row_of_slot.view(topk_idx.shape).int(), slots.int())
        local_experts = _exchanged(
            (experts % num_local_experts)[slots].unsqueeze(1), send_sizes, recv_sizes, self._group
        )
        local = LocalWays(routed(local_experts, num_local_experts, steps), steps)
        ways = ProcessGroupWays(self._group, rows, send_sizes, recv_sizes, local)
        return ways, ways.receive(x)

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


def _exchanged(
    rows: torch.Tensor, send_sizes: list[int], recv_sizes: list[int], group: ProcessGroup
) -> torch.Tensor:
    # As bytes, of which every backend knows how to send them.
    sent = rows.contiguous().view(torch.uint8)
    received = sent.new_empty(sum(recv_sizes), *sent.shape[1:])
    dist.all_to_all_single(received, sent, recv_sizes, send_sizes, group=group)
    return received.view(rows.dtype)
