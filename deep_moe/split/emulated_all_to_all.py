"""Several ranks of a low-latency all-to-all in one process, run together by one emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.heuristics.low_latency import LowLatencyShape

from .emulated_layers import EmulatedLayers
from .handle import Dispatched, DispatchHandle
from .kernels import Launch
from .low_latency import LowLatencyAllToAll
from .split_layer import name_of_dtype

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule
    from deep_moe.heuristics.low_latency import Placement
    from deep_moe.tokens import TokenFormatName


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
        relays_tokens: as of `LowLatencyAllToAll`; `prepare_dispatch` of each layer takes such
            tokens.
        group_size: as of `LowLatencyAllToAll`.
        dtype: as of `LowLatencyAllToAll`.
        options: timeout_s, num_sms and so on, as of `LowLatencyAllToAll`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MemoryError: the machine has too little memory for these sizes.
    """

    def __init__(
        self,
        num_ranks: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        token_format: TokenFormatName = "fp8_128",
        any_format: bool = False,
        zero_copy: bool = False,
        placement: Placement = "ranks",
        relays_tokens: bool = False,
        group_size: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        shape = LowLatencyShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            token_format=token_format,
            has_shared_rows=zero_copy,
            any_format=any_format,
            placement=placement,
            relays_tokens=relays_tokens,
            group_size=group_size,
            dtype=name_of_dtype(dtype),
        )
        self._make(LowLatencyAllToAll, shape, options)

    def dispatch(
        self,
        xs: Sequence[torch.Tensor],
        topk_idxs: Sequence[torch.Tensor],
        *,
        token_format: TokenFormatName | None = None,
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

        def prepare(layer: LowLatencyAllToAll, i: int) -> tuple[Launch, Dispatched]:
            return layer.prepare_dispatch(
                xs[i], topk_idxs[i], token_format=token_format, receive=receive
            )

        return self._run_all(prepare, ranks, schedule)

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

        def prepare(layer: LowLatencyAllToAll, i: int) -> tuple[Launch, torch.Tensor]:
            out = None if outs is None else outs[i]
            return layer.prepare_combine(
                *(ys[i], topk_idxs[i], topk_weights[i], handles[i], out),
                zero_copy=zero_copy,
                receive=receive,
                again=again,
            )

        return self._run_all(prepare, ranks, schedule)

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

        def prepare(layer: LowLatencyAllToAll, i: int) -> tuple[Launch, None]:
            return layer.prepare_receive(handles[i]), None

        self._run_all(prepare, ranks, schedule)

    def mask_ranks(self, ranks: Sequence[int]) -> None:
        """Go on without these ranks; an empty list lets all take part.

        Args:
            ranks: numbers of the ranks to leave out.
        """
        for layer in self.layers:
            if layer.rank not in ranks:
                layer.mask_ranks(ranks)
