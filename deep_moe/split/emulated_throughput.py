"""Several ranks of a throughput all-to-all in one process, run together by one emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.described import described_as
from deep_moe.fused.options import MASKED_RANKS
from deep_moe.heuristics.throughput import ThroughputShape

from .emulated_layers import EmulatedLayers
from .kernels import Launch
from .split_layer import name_of_dtype
from .throughput import AllToAll, AllToAllHandle, Received

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule
    from deep_moe.tokens import TokenFormatName

Tensors = Sequence[torch.Tensor]


@described_as(AllToAll)
class EmulatedThroughputAllToAll(EmulatedLayers[AllToAll]):
    """`num_ranks` ranks of an `AllToAll`, without processes or a GPU. Its methods take and give
    lists with one entry for each rank.

    Attributes:
        layers: each rank's own.

    Other arguments and errors are as of `AllToAll`.

    Args:
        num_ranks: ranks to emulate.
        options: timeout_s, num_sms and so on, as of `AllToAll`.
    """

    def __init__(
        self,
        num_ranks: int,
        max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        max_recv_rows: int,
        *,
        expert_alignment: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        shape = ThroughputShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank,
            max_recv_rows=max_recv_rows,
            expert_alignment=expert_alignment,
            dtype=name_of_dtype(dtype),
        )
        self._make(AllToAll, shape, options)

    def dispatch(
        self,
        xs: Tensors,
        topk_idxs: Tensors | None = None,
        *,
        topk_weights: Tensors | None = None,
        x_sfs: Tensors | None = None,
        token_format: TokenFormatName | None = None,
        handles: Sequence[AllToAllHandle] | None = None,
        row_ids: bool = False,
        masked_ranks: Tensors | None = None,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> list[tuple[Received, AllToAllHandle]]:
        """Every rank's `dispatch`.

        Args:
            xs: each rank's x.
            topk_idxs: each rank's topk_idx.
            topk_weights: each rank's topk_weights.
            x_sfs: each rank's x_sf.
            token_format: of this call.
            handles: each rank's handle, instead of topk_idxs.
            row_ids: as of `AllToAll.dispatch`.
            masked_ranks: each rank's masked_ranks.
            ranks: those that take part, by default all; the others never arrive, and lists are of
                these only.
            schedule: how warps are interleaved.
        """
        of_rank = {
            "topk_idx": topk_idxs,
            "topk_weights": topk_weights,
            "x_sf": x_sfs,
            "handle": handles,
            MASKED_RANKS: masked_ranks,
        }
        given = {name: values for name, values in of_rank.items() if values is not None}

        def prepare(layer: AllToAll, i: int) -> tuple[Launch, tuple[Received, AllToAllHandle]]:
            own: dict[str, Any] = {name: values[i] for name, values in given.items()}
            return layer.prepare_dispatch(xs[i], token_format=token_format, row_ids=row_ids, **own)

        return self._run_all(prepare, ranks, schedule)

    @described_as(dispatch)
    def combine(
        self,
        ys: Tensors,
        handles: Sequence[AllToAllHandle],
        *,
        topk_weights: Tensors | None = None,
        masked_ranks: Tensors | None = None,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> list[torch.Tensor]:
        """Every rank's `combine`; ranks and schedule as in `dispatch`.

        Other arguments are as of `dispatch`.

        Args:
            ys: each rank's y.
            handles: each rank's handle.
            ranks: those that take part, by default all; the others never arrive, and the results
                are of these only.

        """

        def prepare(layer: AllToAll, i: int) -> tuple[Launch, torch.Tensor]:
            weights = None if topk_weights is None else topk_weights[i]
            mask = None if masked_ranks is None else masked_ranks[i]
            return layer.prepare_combine(ys[i], handles[i], topk_weights=weights, masked_ranks=mask)

        return self._run_all(prepare, ranks, schedule)

    @described_as(dispatch)
    def return_scalars(
        self,
        values: Tensors,
        handles: Sequence[AllToAllHandle],
        *,
        masked_ranks: Tensors | None = None,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> list[torch.Tensor]:
        """Every rank's `return_scalars`; ranks and schedule as in `dispatch`.

        Other arguments are as of `dispatch`.

        Args:
            values: each rank's values.
            handles: each rank's handle.
            ranks: those that take part, by default all; the others never arrive, and the results
                are of these only.

        """

        def prepare(layer: AllToAll, i: int) -> tuple[Launch, torch.Tensor]:
            mask = None if masked_ranks is None else masked_ranks[i]
            return layer.prepare_return_scalars(values[i], handles[i], masked_ranks=mask)

        return self._run_all(prepare, ranks, schedule)
