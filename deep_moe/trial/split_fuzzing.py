"""The split path's cases of `deep-moe fuzz`: dispatch, grouped experts and combine of several ranks
in one emulator; see fuzzing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.formats.block_scaled import pack_ue8m0
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics.low_latency import PLACEMENTS
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.split.grouped_experts import token_formats_for
from deep_moe.targets import target_of
from deep_moe.tokens import ALL_TO_ALL_FORMATS, token_format

from .bounds import Bounds, reference_bounds
from .calls import RankOutput, model_inputs
from .fuzzing import (
    ALL_ACTIVATIONS,
    BESIDE,
    EXACT_ACTIVATIONS,
    SMALL_POOL,
    FuzzCase,
    axes,
)
from .reference import reference_mega_moe
from .split_calls import RankExperts, all_to_all_sizes, received_rows
from .synthetic import Layer, Tokens

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

# Ranks, experts, top-k, hidden, intermediate. A multiple of 512, so that every format goes.
_SHAPES = ((1, 4, 2, 512, 256), (2, 4, 3, 512, 96), (2, 6, 2, 512, 128), (3, 6, 4, 512, 128))
# Whose values are those that the caller's tokens stand for.
_EXACT_FORMATS = ("mxfp8", "bf16")


@lru_cache
def split_axes(arch: str) -> dict[str, tuple[Any, ...]]:
    """What cases of an architecture differ in; where it says nothing, as in the fused call's."""
    fused = axes(arch)
    return {
        # With the format of tokens on their way.
        "weights": tuple(
            f"{name}{BESIDE}{tokens}"
            for name in dict.fromkeys(own.weights for own in target_of(arch).weights)
            for tokens in token_formats_for(name, arch)
            if tokens in ALL_TO_ALL_FORMATS
        ),
        "shape": _SHAPES,
        "tile": fused["tile"],
        "turns": fused["turns"],
        "biases": fused["biases"],
        "activation": ALL_ACTIVATIONS,
        "placement": PLACEMENTS,
        # Of dispatch and combine, each: one that sends and receives, or two.
        "kernels": ("one", "two"),
        # From the experts to the tokens' ranks; "twice": the first time all zeros.
        "rows": ("sent", "fetched", "sent twice"),
        "ids": (torch.int64, torch.int32),
        "pool": (None, SMALL_POOL),
        # So far all is compiled in.
        "layout": ("by expert", "one behind the other"),
        "tokens": fused["tokens"],
        "slots": fused["slots"],
        "values": fused["values"],
        "schedule": SCHEDULES,
    }


@dataclass(frozen=True)
class SplitCase(FuzzCase):
    """Two calls of all ranks: tokens of both are quantized by the dispatch."""

    path: ClassVar[str] = "split"
    num_held: ClassVar[int] = 12

    @staticmethod
    def axes_of(arch: str) -> dict[str, tuple[Any, ...]]:
        return split_axes(arch)

    @property
    def token_format(self) -> str:
        """Of tokens on their way."""
        return str(self.values["weights"]).partition(BESIDE)[2]

    @property
    def _formats(self) -> tuple[WeightsName, TokenFormatName]:
        weights = str(self.values["weights"]).partition(BESIDE)[0]
        return cast("WeightsName", weights), token_format(self.token_format).in_products

    def received(self, tokens: Sequence[Tokens]) -> torch.Tensor:
        return received_rows(self.shape, tokens)

    def as_received(self, tokens: Tokens) -> Tokens:
        x, own = model_inputs(tokens)
        if self.token_format in (*_EXACT_FORMATS, "fp8_128"):
            return own
        values, scales = quantize_e4m3_float(x, powers_of_two=True)
        scale_bytes = (scales.log2().int() + 127).to(torch.uint8)
        x_sf = pack_ue8m0(scale_bytes.repeat_interleave(4, 1))
        return Tokens(values, x_sf, own.topk_idx, own.topk_weights)

    def expected(self, rank: int, tokens: Tokens, layer: Layer) -> torch.Tensor | Bounds:
        activation = self.activation
        inputs = layer.operands(tokens)
        how: dict[str, Any] = {
            "activation": activation,
            "numerics": self.target_weights.numerics,
            "weights_in_combine": True,
            **layer.biases,
        }
        if activation in EXACT_ACTIVATIONS and self.token_format in _EXACT_FORMATS:
            return reference_mega_moe(*inputs, **how)
        return reference_bounds(*inputs, sum_bits=FP32_SUM_BITS, **how)

    def _outputs(self, layer: Layer, calls: Sequence[Sequence[Tokens]]) -> list[list[RankOutput]]:
        shape = self.shape
        of_both: dict[str, Any] = {
            "arch": self.arch,
            "num_sms": 4,
            "schedule_seed": self.number,
            "token_format": self.token_format,
        }
        of_experts = {
            **of_both,
            "activation": self.activation,
            "overrides": self.overrides,
        }
        with EmulatedAllToAll(
            *all_to_all_sizes(shape),
            placement=self.values["placement"],
            zero_copy=self.values["rows"] == "fetched",
            **of_both,
        ) as all_to_all:
            ranks = [
                RankExperts(shape, layer, rank, torch.device("cpu"), of_experts)
                for rank in range(shape.num_ranks)
            ]
            try:
                return [self._call(all_to_all, ranks, tokens) for tokens in calls]
            finally:
                for rank in ranks:
                    rank.experts.close()

    def _call(
        self, all_to_all: EmulatedAllToAll, ranks: Sequence[RankExperts], tokens: Sequence[Tokens]
    ) -> list[RankOutput]:
        values = self.values
        how: dict[str, Any] = {"schedule": values["schedule"]}
        is_one, are_fetched = values["kernels"] == "one", values["rows"] == "fetched"
        ids = [own.topk_idx.to(values["ids"]) for own in tokens]
        weights = [own.topk_weights for own in tokens]
        xs = [model_inputs(own)[0] for own in tokens]
        results = all_to_all.dispatch(xs, ids, receive=is_one, **how)
        handles = [result.handle for result in results]
        if not is_one:
            all_to_all.receive(handles, **how)
        ys = [
            rank(
                result,
                own.get_combine_buffer(result.handle) if are_fetched else None,
                behind_each_other=values["layout"] == "one behind the other",
            )
            for rank, own, result in zip(ranks, all_to_all.layers, results, strict=True)
        ]
        if values["rows"] == "sent twice":
            all_to_all.combine([torch.zeros_like(y) for y in ys], ids, weights, handles, **how)
            how["again"] = True
        outs = all_to_all.combine(
            ys, ids, weights, handles, zero_copy=are_fetched, receive=is_one, **how
        )
        if not is_one:
            all_to_all.receive(handles, schedule=values["schedule"])
        return [
            RankOutput(out, result.recv_count) for out, result in zip(outs, results, strict=True)
        ]
