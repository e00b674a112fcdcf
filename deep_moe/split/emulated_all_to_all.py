"""Several ranks of a low-latency all-to-all in one process, run together by one emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.described import described_as
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


@described_as(LowLatencyAllToAll)
class EmulatedAllToAll(EmulatedLayers[LowLatencyAllToAll]):
    """`num_ranks` ranks of a `LowLatencyAllToAll`, without processes or a GPU. Its methods take and
    give lists with one entry for each rank.

    Attributes:
        layers: each rank's own.

    Other arguments and errors are as of `LowLatencyAllToAll`.

    Args:
        num_ranks: ranks to emulate.
        relays_tokens: as of `LowLatencyAllToAll`; `prepare_dispatch` of each layer takes such
            tokens.
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

    @described_as(dispatch, LowLatencyAllToAll.combine)
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

        Other arguments are as of `dispatch` and `LowLatencyAllToAll.combine`.

        Args:
            ys: each rank's y.
            topk_weights: each rank's topk_weights.
            handles: each rank's handle.
            outs: where each rank's result goes, by default new tensors.

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

    @described_as(dispatch)
    def receive(
        self,
        handles: Sequence[DispatchHandle],
        *,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> None:
        """Every rank's `receive`; ranks and schedule as in `dispatch`.

        Other arguments are as of `dispatch`.

        Args:
            handles: each rank's handle.

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
