"""Several ranks of a low-latency all-to-all in one process, run together by one emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.fused.emulated_ranks import run_ranks
from deep_moe.fused.rank_buffer import used
from deep_moe.fused.symm_memory import private_host_memories
from deep_moe.heuristics.low_latency import LowLatencyShape, low_latency_buffer_layout
from deep_moe.jit.launch import RankLaunch

from .handle import Dispatched, DispatchHandle
from .kernels import Launch
from .low_latency import LowLatencyAllToAll

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule


class EmulatedAllToAll:
    """`num_ranks` ranks of a `LowLatencyAllToAll`, without processes or a GPU. Its methods take and
    give lists with one entry for each rank.

    layers: each rank's own. options: timeout_s, num_sms and so on, as of `LowLatencyAllToAll`.
    """

    def __init__(
        self,
        num_ranks: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        format: str = "fp8_128",
        any_format: bool = False,
        zero_copy: bool = False,
        **options: Any,
    ) -> None:
        self.shape = LowLatencyShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            format=format,
            has_shared_rows=zero_copy,
            any_format=any_format,
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
        format: str | None = None,
        receive: bool = True,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> list[Dispatched]:
        """Every rank's `dispatch`. ranks: those that take part, by default all; the others never
        arrive, and the results are of these only. schedule: how warps are interleaved."""
        taking_part = self._taking_part(ranks)
        prepared = [
            self.layers[rank].prepare_dispatch(x, topk_idx, format=format, receive=receive)
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
        """Every rank's `combine`; ranks and schedule as in `dispatch`."""
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
        """Every rank's `receive`; ranks and schedule as in `dispatch`."""
        taking_part = self._taking_part(ranks)
        launches = [
            [self.layers[rank].prepare_receive(handle)]
            for rank, handle in zip(taking_part, handles, strict=True)
        ]
        self.run(launches, ranks=taking_part, schedule=schedule)

    def run(
        self,
        launches: Sequence[Sequence[Launch]],
        *,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> None:
        """Run prepared kernels: of each rank one after the other, of different ranks at once."""
        taking_part = self._taking_part(ranks)
        buffers = [layer.buffer for layer in self.layers]
        settings = self.layers[0].settings
        with used(buffers):
            emulated = [
                launch
                for rank, queue in zip(taking_part, launches, strict=True)
                for launch in self._emulated(rank, queue)
            ]
            run_ranks(
                buffers,
                emulated,
                taking_part,
                seed=settings.schedule_seed,
                schedule=schedule,
                checked=settings.checked,
            )

    def _emulated(self, rank: int, queue: Sequence[Launch]) -> list[RankLaunch]:
        """One rank's. What one of its kernels writes and another one reads is one region."""
        buffers = self.layers[rank].memory_regions()
        emulated = [launch.emulated(rank, buffers) for launch in queue]
        regions = {region.address: region for launch in emulated for region in launch.memory}
        for launch in emulated:
            for region in launch.memory:
                if region.is_writable:
                    regions[region.address] = region
        memory = tuple(regions.values())
        return [replace(launch, memory=memory) for launch in emulated]

    def mask_ranks(self, ranks: Sequence[int]) -> None:
        """Go on without these ranks; an empty list lets all take part."""
        for layer in self.layers:
            if layer.rank not in ranks:
                layer.mask_ranks(ranks)

    def reset(self) -> None:
        """Make all layers usable again after a failed call."""
        for layer in self.layers:
            layer.reset()

    def close(self) -> None:
        """Give the memory back."""
        for layer in self.layers:
            layer.close()

    def __enter__(self) -> EmulatedAllToAll:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _taking_part(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.shape.num_ranks) if ranks is None else ranks
