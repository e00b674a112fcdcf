"""Cases of `deep-moe fuzz` for the layer of many tokens: the throughput all-to-all and experts of
several ranks in one emulator; see fuzzing.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.segments import align_up

from .calls import RankOutput
from .split_fuzzing import SplitCase, split_axes
from .synthetic import Layer, Tokens, received
from .throughput_calls import emulated_ranks

# Of the low-latency path alone.
_OTHER_AXES = ("placement", "kernels", "rows", "layout")


@lru_cache
def throughput_axes(arch: str) -> dict[str, tuple[Any, ...]]:
    """What cases of an architecture differ in; where it says nothing, as in the low-latency path's
    (`split_axes`)."""
    shared = {name: all_of for name, all_of in split_axes(arch).items() if name not in _OTHER_AXES}
    return {
        # Of the rows of an expert.
        "alignment": (1, 32),
        # max_recv_rows: for every slot, or for those of the larger call.
        "room": ("for all", "for what comes"),
        # From the experts to where other ranks fetch them.
        "rows": ("written there", "copied"),
        **shared,
    }


@dataclass(frozen=True)
class ThroughputCase(SplitCase):
    """Two calls of all ranks: tokens of both are quantized by the dispatch."""

    path: ClassVar[str] = "throughput"
    num_held: ClassVar[int] = 12

    @staticmethod
    def axes_of(arch: str) -> dict[str, tuple[Any, ...]]:
        return throughput_axes(arch)

    def received(self, tokens: Sequence[Tokens]) -> torch.Tensor:
        """Each used slot is a row."""
        return received(self.shape, tokens)

    def _outputs(self, layer: Layer, calls: Sequence[Sequence[Tokens]]) -> list[list[RankOutput]]:
        values = self.values
        options: dict[str, Any] = {
            "arch": self.arch,
            "num_sms": 4,
            "schedule_seed": self.number,
            "activation": self.activation,
            "overrides": self.overrides,
        }
        how: dict[str, Any] = {
            "ids": values["ids"],
            "copies_rows": values["rows"] == "copied",
            "schedule": values["schedule"],
        }
        alignment = values["alignment"]
        with emulated_ranks(
            self.shape,
            layer,
            options,
            max_recv_rows=most_rows_of(
                self.shape, calls if values["room"] == "for what comes" else None, alignment
            ),
            expert_alignment=alignment,
            token_format=self.token_format,
        ) as ranks:
            return [ranks.call(tokens, **how) for tokens in calls]


def most_rows_of(shape: MoEShape, calls: Sequence[Sequence[Tokens]] | None, alignment: int) -> int:
    """Rows, padding included, that a rank has in the largest of the calls, at least 1; None: in any
    call."""
    if calls is None:
        slots = shape.num_ranks * shape.num_max_tokens_per_rank * shape.num_topk
        return slots + shape.num_experts_per_rank * (alignment - 1)
    most = 1
    for tokens in calls:
        for of_rank in received(shape, tokens).split(shape.num_experts_per_rank):
            most = max(most, sum(align_up(count, alignment) for count in of_rank.tolist()))
    return most
