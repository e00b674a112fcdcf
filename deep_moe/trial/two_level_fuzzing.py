"""Cases of `deep-moe fuzz` for a layer over several domains: a process for each rank, PyTorch's
transport between domains, the emulator inside them; see fuzzing.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from deep_moe.errors import ForeignTokensError
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.segments import ceil_div
from deep_moe.targets import target_of

from .bounds import Bounds
from .calls import RankOutput, by_call, model_inputs, rank_operands
from .fuzzing import ALL_ACTIVATIONS, BESIDE, EXACT_ACTIVATIONS, FuzzCase, axes
from .rank_processes import results_of_ranks
from .synthetic import Layer, Tokens, exact_tokens
from .two_level import make_layer, two_level_bounds

_MOST_TOKENS = 13
_TIMEOUT_S = 120.0  # of waits for other ranks
# Domains, ranks of all of them, experts, top-k, hidden, intermediate. In one, tokens go to fewer
# domains than there are.
_SHAPES = (
    (2, 4, 8, 3, 256, 96),
    (3, 3, 9, 2, 128, 128),
    (4, 4, 8, 2, 256, 128),
)


@lru_cache
def two_level_axes(arch: str) -> dict[str, tuple[Any, ...]]:
    """What cases of an architecture differ in; where it says nothing, as in the fused call's."""
    fused = axes(arch)
    return {
        "weights": tuple(
            f"{own.weights}{BESIDE}{own.token_format}"
            for own in target_of(arch).weights
            if not own.tokens.has_float_scales
        ),
        "shape": _SHAPES,
        "shared experts": (0, 1),
        "tile": fused["tile"],
        "biases": fused["biases"],
        "activation": ALL_ACTIVATIONS,
        "chunks": (1, 3),
        "sizes": ("fixed", "exact"),
        # Of foreign tokens: for all that can be, or for half of them. Then calls bring no more than
        # there is room for, but for one in front of them.
        "room": ("for all", "for half"),
        # So far all is compiled in.
        # The most tokens that a rank of a call has.
        "most tokens": ("unknown", "known"),
        "ids": (torch.int64, torch.int32),
        "routing weights": (torch.float32, torch.bfloat16),
        "out": ("new", "given", "x"),
        "tokens": fused["tokens"],
        "slots": (*fused["slots"], "all to one domain", "none to one domain"),
        "values": fused["values"],
    }


@dataclass(frozen=True)
class TwoLevelCase(FuzzCase):
    """Calls of all ranks of all domains, on inputs in BF16, one after the other."""

    path: ClassVar[str] = "two_level"
    num_held: ClassVar[int] = 9
    num_calls: ClassVar[int] = 3

    @staticmethod
    def axes_of(arch: str) -> dict[str, tuple[Any, ...]]:
        return two_level_axes(arch)

    @property
    def num_domains(self) -> int:
        return int(self.values["shape"][0])

    @cached_property
    def shape(self) -> MoEShape:
        """As if all ranks were of one domain."""
        own = replace(self, values={**self.values, "shape": self.values["shape"][1:]})
        return replace(super(TwoLevelCase, own).shape, num_max_tokens_per_rank=_MOST_TOKENS)

    @property
    def is_prepared(self) -> bool:
        return True

    @property
    def overrides(self) -> dict[str, int]:
        return self.target_weights.fuzz_tiles[self.values["tile"]]

    @property
    def rooms(self) -> int | None:
        """Most tokens of a chunk from one domain to another, or, with exact sizes, from all others
        together; None: all."""
        if self.values["room"] == "for all":
            return None
        num_tokens = ceil_div(_MOST_TOKENS, self.values["chunks"])
        return num_tokens * (1 if self.values["sizes"] == "fixed" else self.num_domains - 1) // 2

    def inputs(self) -> list[list[Tokens]]:
        calls = super().inputs()
        if self.rooms is not None:
            for tokens in calls:
                self._keep_within(self.rooms, tokens)
        return calls

    def _keep_within(self, rooms: int, of_ranks: Sequence[Tokens]) -> None:
        """Of the tokens of a call, those for which there is no room do not name that domain."""
        number = self.shape.num_experts // self.num_domains
        per_domain = self.shape.num_ranks // self.num_domains
        sent: Counter[tuple[int, ...]] = Counter()
        for rank, tokens in enumerate(of_ranks):
            source, place = divmod(rank, per_domain)
            in_a_chunk = max(1, ceil_div(tokens.num_tokens, self.values["chunks"]))
            part = source if self.values["sizes"] == "fixed" else -1
            for token, ids in enumerate(tokens.topk_idx):
                for domain in {expert // number for expert in ids.tolist()} - {source, -1}:
                    room = domain, place, token // in_a_chunk, part
                    if sent[room] == rooms:
                        ids[ids // number == domain] = -1
                    else:
                        sent[room] += 1

    def expected(self, rank: int, tokens: Tokens, layer: Layer) -> torch.Tensor | Bounds:
        bounds = two_level_bounds(
            self.shape,
            self.num_domains,
            rank * self.num_domains // self.shape.num_ranks,
            layer,
            tokens,
            activation=self.activation,
            numerics=self.target_weights.numerics,
            sum_bits=FP32_SUM_BITS,
        )
        return bounds.y if self.activation in EXACT_ACTIVATIONS else bounds

    def _tokens(self, rank: int, count: int, seed: int) -> Tokens:
        tokens = super()._tokens(rank, count, seed)
        slots, ids = self.values["slots"], tokens.topk_idx
        number = self.shape.num_experts // self.num_domains
        if slots == "all to one domain":
            ids[:] = torch.arange(ids.shape[1]) + number * (seed % self.num_domains)
        elif slots == "none to one domain":
            # Those that its neighbour has of the same number may then be named twice.
            ids[ids // number == seed % self.num_domains] = -1
        return tokens

    def _outputs(self, layer: Layer, calls: Sequence[Sequence[Tokens]]) -> list[list[RankOutput]]:
        arguments: dict[str, Any] = {
            "num_chunks": self.values["chunks"],
            "exact_sizes": self.values["sizes"] == "exact",
            "timeout_s": _TIMEOUT_S,
        }
        too_many = None
        if self.rooms is not None:
            num_others = self.num_domains - 1 if self.values["sizes"] == "fixed" else 1
            arguments["num_max_foreign_tokens"] = self.rooms * self.values["chunks"] * num_others
            too_many = self._tokens_of_one_place()
        try:
            of_ranks = results_of_ranks(
                *(_run_rank, self.shape.num_ranks, "cpu"),
                *(self, layer, calls, too_many, arguments),
                start_method="fork",
            )
        except ProcessRaisedException as error:
            raise RuntimeError(str(error)) from error
        return by_call(of_ranks)

    def _tokens_of_one_place(self) -> list[Tokens]:
        """Each rank's: as many as can be to one domain from those of one number in their domains,
        so that the others have to be told of what they do not see."""
        per_domain = self.shape.num_ranks // self.num_domains
        tokens = [
            exact_tokens(
                self.shape,
                _MOST_TOKENS if rank % per_domain == self.number % per_domain else 1,
                seed=rank,
            )
            for rank in range(self.shape.num_ranks)
        ]
        for own in tokens:
            own.topk_idx[:] = torch.arange(self.shape.num_topk)
        return tokens


def _run_rank(
    device: torch.device,
    case: TwoLevelCase,
    layer: Layer,
    calls: Sequence[Sequence[Tokens]],
    too_many: Sequence[Tokens] | None,
    arguments: dict[str, Any],
) -> list[RankOutput]:
    """What this rank got, call by call. too_many: of a call for which there is no room."""
    rank, values, shape = dist.get_rank(), case.values, case.shape
    weights, biases = rank_operands(shape, layer, rank, device, case.arch)
    choose = random.Random(case.number)
    moe = make_layer(shape, case.num_domains, device, **arguments)

    def call(of_ranks: Sequence[Tokens]) -> RankOutput:
        own = of_ranks[rank]
        x = model_inputs(own)[0].clone()
        out = {"new": None, "given": torch.full_like(x, torch.nan), "x": x}[values["out"]]
        stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32)
        largest = max(tokens.num_tokens for tokens in of_ranks)
        y = moe.call(
            x,
            own.topk_idx.to(values["ids"]),
            own.topk_weights.to(values["routing weights"]),
            weights,
            stats,
            out=out,
            most_tokens=choose.randint(largest, _MOST_TOKENS)
            if values["most tokens"] == "known"
            else None,
            activation=case.activation,
            arch=case.arch,
            num_sms=2,
            # So that calls of several sizes share a kernel.
            expected_tokens_per_rank=_MOST_TOKENS,
            overrides=case.overrides,
            schedule_seed=case.number,
            **biases,
        )
        moe.check()
        if out is not None and y is not out:
            raise RuntimeError("the result is another tensor than `out`")
        return RankOutput(y, stats)

    if too_many is not None:
        try:
            call(too_many)
        except ForeignTokensError:
            pass
        else:
            raise RuntimeError(f"rank {rank} was not told of foreign tokens without room")
    outputs = [call(tokens) for tokens in calls]
    dist.barrier()  # no rank takes its memory away while another still reads it
    moe.close()
    return outputs
