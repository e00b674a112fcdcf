"""Several ranks of a low-latency all-to-all in one process, run together by one emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.fused.symm_memory import private_host_memories
from deep_moe.heuristics.low_latency import LowLatencyShape, low_latency_buffer_layout

from .emulated_layers import EmulatedLayers
from .handle import Dispatched, DispatchHandle
from .low_latency import LowLatencyAllToAll

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule


class EmulatedAllToAll(EmulatedLayers[LowLatencyAllToAll]):
    """`num_ranks` ranks of a `LowLatencyAllToAll`, without processes or a GPU. Its methods take and
    give lists with one entry for each rank.

    Attributes:
        layers: each rank's own.

    Args:
        num_ranks: ranks to emulate.
        num_max_tokens_per_rank: as of `LowLatencyAllToAll`.
        hidden: as of `LowLatencyAllToAll`.
        num_experts: as of `LowLatencyAllToAll`.
        num_topk: as of `LowLatencyAllToAll`.
        token_format: as of `LowLatencyAllToAll`.
        any_format: as of `LowLatencyAllToAll`.
        zero_copy: as of `LowLatencyAllToAll`.
        placement: as of `LowLatencyAllToAll`.
        options: timeout_s, num_sms and so on, as of `LowLatencyAllToAll`.
    """

    def __init__(
        self,
        num_ranks: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        token_format: str = "fp8_128",
        any_format: bool = False,
        zero_copy: bool = False,
        placement: str = "ranks",
        **options: Any,
    ) -> None:
        self.shape = LowLatencyShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            token_format=token_format,
            has_shared_rows=zero_copy,
            any_format=any_format,
            placement=placement,
        )
        memories = private_host_memories(num_ranks, low_latency_buffer_layout(self.shape).num_bytes)
        self.layers = [
            LowLatencyAllToAll.of_memory(self.shape, memory, **options) for memory in memories
        ]

    def dispatch(
        self,
        xs: Sequence[torch.Tensor],
        topk_idxs: Sequence[torch.Tensor],
        *,
        token_format: str | None = None,
        receive: bool = True,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> list[Dispatched]:
        """Every rank's `dispatch`.

        Args:
            xs: each rank's x.
            topk_idxs: each rank's topk_idx.
            token_format: of this call.
            receive: as of `LowLatencyAllToAll.dispatch`.
            ranks: those that take part, by default all; the others never arrive, and the results
                are of these only.
            schedule: how warps are interleaved.
        """
        taking_part = self._taking_part(ranks)
        prepared = [
            self.layers[rank].prepare_dispatch(
                x, topk_idx, token_format=token_format, receive=receive
            )
            for rank, x, topk_idx in zip(taking_part, xs, topk_idxs, strict=True)
        ]
        self.run([[launch] for launch, _ in prepared], ranks=taking_part, schedule=schedule)
        return [result for _, result in prepared]

    def combine(
        self,
        ys: Sequence[torch.Tensor],
        topk_idxs: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        handles: Sequence[DispatchHandle],
        outs: Sequence[torch.Tensor | None] | None = None,
        *,
        zero_copy: bool = False,
        receive: bool = True,
        again: bool = False,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> list[torch.Tensor]:
        """Every rank's `combine`; ranks and schedule as in `dispatch`.

        Args:
            ys: each rank's y.
            topk_idxs: each rank's topk_idx.
            topk_weights: each rank's topk_weights.
            handles: each rank's handle.
            outs: where each rank's result goes, by default new tensors.
            zero_copy: as of `LowLatencyAllToAll.combine`.
            receive: as there.
            again: as there.
            ranks: those that take part, by default all; the others never arrive, and the results
                are of these only.
            schedule: how warps are interleaved.
        """
        taking_part = self._taking_part(ranks)
        outs = [None] * len(taking_part) if outs is None else outs
        prepared = [
            self.layers[rank].prepare_combine(
                *arguments, zero_copy=zero_copy, receive=receive, again=again
            )
            for rank, *arguments in zip(
                taking_part, ys, topk_idxs, topk_weights, handles, outs, strict=True
            )
        ]
        self.run([[launch] for launch, _ in prepared], ranks=taking_part, schedule=schedule)
        return [out for _, out in prepared]

    def receive(
        self,
        handles: Sequence[DispatchHandle],
        *,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> None:
        """Every rank's `receive`; ranks and schedule as in `dispatch`.

        Args:
            handles: each rank's handle.
            ranks: those that take part, by default all; the others never arrive, and the results
                are of these only.
            schedule: how warps are interleaved.
        """
        taking_part = self._taking_part(ranks)
        launches = [
            [self.layers[rank].prepare_receive(handle)]
            for rank, handle in zip(taking_part, handles, strict=True)
        ]
        self.run(launches, ranks=taking_part, schedule=schedule)

    def mask_ranks(self, ranks: Sequence[int]) -> None:
        """Go on without these ranks; an empty list lets all take part.

        Args:
            ranks: numbers of the ranks to leave out.
        """
        for layer in self.layers:
            if layer.rank not in ranks:
                layer.mask_ranks(ranks)
