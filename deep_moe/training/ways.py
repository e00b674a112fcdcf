"""How the tokens of a call get to the rows that a rank's experts read, and back.

LocalWays          all experts are here; nothing travels (LocalExchange makes them)
ProcessGroupWays   process_group.py
AllToAllWays       all_to_all.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .quantized import QuantizedColumns
from .rows import Rows
from .steps import Steps


class Ways(Protocol):
    """Every rank calls the same of these in the same order, also with nothing to send.

    rows: of this rank's experts. Its slots are those that it receives.
    """

    @property
    def rows(self) -> Rows: ...

    def receive(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's tokens [tokens, H] to their experts; what arrives here, as `gather` takes
        it."""
        ...

    def gather(self, received: torch.Tensor, *, rounds_to_mxfp8: bool = False) -> torch.Tensor:
        """What experts read [R, H], padding zero."""
        ...

    def gather_columns(self, received: torch.Tensor) -> QuantizedColumns:
        """`Steps.quantize_columns` of what experts read."""
        ...

    def receive_weights(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """This rank's routing weights [tokens, topk], the call's, to their experts; those of the
        slots of `rows`, in any shape of so many."""
        ...

    def scatter(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`Steps.scatter`, to the tokens' ranks. topk_weights: this rank's, for its tokens; bias:
        of its experts."""
        ...

    def return_weights(self, values: torch.Tensor) -> torch.Tensor:
        """A number for each slot of `rows`, shaped as `receive_weights` had them, to the tokens'
        ranks: [tokens, topk], zero for unused slots."""
        ...


class Exchange(Protocol):
    """Who carries rows between ranks."""

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_local_experts: int,
        steps: Steps,
    ) -> tuple[Ways, torch.Tensor]:
        """Of global ids: rank r owns experts r * num_local_experts and following. The ways of a
        call and its first `receive`, of x."""
        ...


@dataclass(frozen=True)
class LocalWays:
    """Of a rank with all experts."""

    rows: Rows
    steps: Steps

    def receive(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def gather(self, received: torch.Tensor, *, rounds_to_mxfp8: bool = False) -> torch.Tensor:
        return self.steps.gather(received, self.rows, rounds_to_mxfp8=rounds_to_mxfp8)

    def gather_columns(self, received: torch.Tensor) -> QuantizedColumns:
        return self.steps.quantize_columns(received, self.rows, gathers=True)

    def receive_weights(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return topk_weights

    def scatter(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.steps.scatter(first, second, self.rows, topk_weights=topk_weights, bias=bias)

    def return_weights(self, values: torch.Tensor) -> torch.Tensor:
        return values


def routed(topk_idx: torch.Tensor, num_experts: int, steps: Steps) -> Rows:
    """`Steps.route`, also of no slots at all, for which there are no rows."""
    if topk_idx.numel():
        return steps.route(topk_idx, num_experts)
    no_slots = topk_idx.int()
    return Rows(no_slots.new_zeros(num_experts), no_slots, no_slots.view(0))


class LocalExchange:
    """Of a rank with all experts: nothing is carried."""

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_local_experts: int,
        steps: Steps,
    ) -> tuple[LocalWays, torch.Tensor]:
        return LocalWays(routed(topk_idx, num_local_experts, steps), steps), x
