"""Rows between ranks by our `AllToAll`: within an NVLink domain, and no host waits.

Its dispatch brings tokens straight into rows by expert; its combine adds what comes back with the
routing weights, in the order of slots. So rows lie as on one rank with all experts, where the
tokens of rank 0 come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_moe.heuristics.training import ROW_ALIGNMENT
from deep_moe.split.throughput import AllToAll, AllToAllHandle, Received

from .quantized import QuantizedColumns
from .rows import Rows, aligned
from .steps import Steps


@dataclass(frozen=True)
class AllToAllWays:
    """rows: [max_recv_rows], each of which is a slot of its own, unless it is padding."""

    all_to_all: AllToAll
    handle: AllToAllHandle
    rows: Rows
    weights: torch.Tensor  # float32 [max_recv_rows], as they were received
    steps: Steps

    def receive(self, tokens: torch.Tensor) -> torch.Tensor:
        received, _ = self.all_to_all.dispatch(
            aligned(tokens), token_format="bf16", handle=self.handle
        )
        return received.x

    def gather(self, received: torch.Tensor, *, rounds_to_mxfp8: bool = False) -> torch.Tensor:
        if not rounds_to_mxfp8:
            return received
        return self.steps.gather(received, self.rows, rounds_to_mxfp8=True)

    def gather_columns(self, received: torch.Tensor) -> QuantizedColumns:
        return self.steps.quantize_columns(received, self.rows)

    def receive_weights(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return self.weights  # came with the tokens

    def scatter(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made = first
        if second is not None or bias is not None:
            # A row is rounded once more here; combine then need not copy it.
            out = self.all_to_all.get_combine_buffer()
            made = self.steps.scatter(first, second, self.rows, bias=bias, out=out)
        return self.all_to_all.combine(made, self.handle, topk_weights=topk_weights)

    def return_weights(self, values: torch.Tensor) -> torch.Tensor:
        return self.all_to_all.return_scalars(values, self.handle)


class AllToAllExchange:
    """all_to_all: for the layer's sizes. It fails on all ranks if one would get more than
    max_recv_rows: on a CPU at once, on a GPU at the latest at its next call; results until then
    mean nothing."""

    def __init__(self, all_to_all: AllToAll) -> None:
        self._all_to_all = all_to_all

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_local_experts: int,
        steps: Steps,
    ) -> tuple[AllToAllWays, torch.Tensor]:
        layer = self._all_to_all
        self._check(x, topk_idx, num_local_experts)
        if layer.settings.checked:  # it refuses ids of no expert, which are unused slots here
            is_used = (topk_idx >= 0) & (topk_idx < layer.shape.num_experts)
            topk_idx = topk_idx.where(is_used, -1)
        received, handle = layer.dispatch(
            aligned(x), topk_idx, topk_weights=topk_weights, token_format="bf16"
        )
        assert received.topk_weights is not None
        rows = _rows_of(received)
        return AllToAllWays(layer, handle, rows, received.topk_weights, steps), received.x

    def _check(self, x: torch.Tensor, topk_idx: torch.Tensor, num_local_experts: int) -> None:
        """That it is made for these sizes."""
        shape = self._all_to_all.shape
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x must be torch.bfloat16 for an AllToAll as group; got {x.dtype}")
        if shape.expert_alignment % ROW_ALIGNMENT:
            raise ValueError(
                f"expert_alignment of group must be a multiple of {ROW_ALIGNMENT}, the rows that "
                f"products take at once; got {shape.expert_alignment}"
            )
        for name, of_group, given in (
            ("hidden", shape.hidden, x.shape[1]),
            ("num_topk", shape.num_topk, topk_idx.shape[1]),
            ("num_experts per rank", shape.num_experts_per_rank, num_local_experts),
        ):
            if of_group != given:
                raise ValueError(
                    f"group must be an AllToAll of the layer's {name} ({given}); got one of "
                    f"{of_group}"
                )


def _rows_of(received: Received) -> Rows:
    """Ends are bounded: a dispatch that failed leaves them as they were, or beyond all rows, and
    what comes behind it on the stream must not go there."""
    num_rows = received.x.shape[0]
    whole = num_rows // ROW_ALIGNMENT * ROW_ALIGNMENT
    ends = received.expert_end.clamp(0, whole) // ROW_ALIGNMENT * ROW_ALIGNMENT
    offs = ends.cummax(0).values.int()
    used_ends = torch.minimum(received.expert_begin + received.expert_count, offs)
    row = torch.arange(num_rows, dtype=torch.int32, device=offs.device)
    expert = torch.searchsorted(offs, row, right=True).clamp(max=len(offs) - 1)
    slot_of_row = row.where(row < used_ends[expert], -1)
    return Rows(offs, slot_of_row.unsqueeze(1), slot_of_row)
