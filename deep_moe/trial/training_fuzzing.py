"""Small calls of the differentiable layer, forward and backward, each judged by training_bounds.

As in fuzzing.py a case is one value of each axis and follows from one integer, in a round every two
values of two axes meet, and some cases in a row share their kernels. Ranks are threads of this
process: their all-to-all's kernels run in one emulator, under a schedule, with all checks on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch

from deep_moe.activations import ACTIVATIONS, GatedActivation
from deep_moe.emulator.machine import SCHEDULES
from deep_moe.heuristics.products import K_GROUP
from deep_moe.heuristics.segments import align_up
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.split.kernels import Launch
from deep_moe.split.throughput import AllToAll
from deep_moe.targets import products_target
from deep_moe.training.experts import FP8_PRECISIONS
from deep_moe.training.functional import moe

from .fuzzing import (
    ARCHS,
    CASES_PER_KERNEL,
    TOKENS_OF_RANKS,
    counts_of_ranks,
    rows_of_a_round,
    values_of,
)
from .rank_threads import RankThreads
from .training_bounds import Formula, bounds_of_layer

MAX_TOKENS = 24  # of a rank
_NUM_HELD = 7  # the first axes, which are compiled in
_MATRICES = ("w1", "w3", "w2")
_WEIGHTS = (*_MATRICES, "b1", "b3", "b2")
_ALL_EXPERTS_SHARE = 8  # rows at a multiple of which an expert begins

Tensors = dict[str, torch.Tensor | None]
Result = TypeVar("Result")

AXES: dict[str, tuple[Any, ...]] = {
    # One, with all experts; or several over an all-to-all, which one alone may have, too.
    "ranks": ("one", "one and an all-to-all", 2, 3),
    # Experts of a rank, top-k, hidden, intermediate. In one, quantized rows and columns have two
    # scales; one has more experts than a warp has lanes.
    "shape": (
        (2, 2, 128, 32),
        (3, 3, 128, 96),
        (1, 1, 256, 160),
        (5, 4, 128, 64),
        (40, 4, 128, 32),
    ),
    "steps": (None, *ARCHS[:2]),  # PyTorch's, or a target's kernels: other targets have these, too
    "precision": ("bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad"),
    "w1 and w3": ("apart", "in one"),
    "activation": tuple(
        case
        for kind in ACTIVATIONS.values()
        if issubclass(kind, GatedActivation)
        for case in kind.training_cases()
    ),
    "biases": (None, torch.float32, torch.bfloat16),
    # So far all is compiled in.
    "kept": ("as usual", "quantized", "nothing", "received tokens", "received tokens only"),
    "tokens": TOKENS_OF_RANKS,
    "ids": (torch.int64, torch.int32),
    "slots": ("all", "unused", "named twice", "none in the last token", "all to one expert"),
    "gates": ("numbers", "some zero", "all zero"),
    "schedule": SCHEDULES,
    # Of weights' gradients: returned, or added to zeros of their type or of float32.
    "sums": ("returned", "grad", "main_grad"),
}
_SIZES = tuple(map(len, AXES.values()))
CASES_PER_ROUND = rows_of_a_round(_SIZES, _NUM_HELD)


@dataclass(frozen=True)
class TrainingCase:
    """One call of all ranks."""

    path: ClassVar[str] = "training"
    arch: ClassVar[str] = "any"  # for who counts cases by it: here it is a value of an axis

    number: int
    values: Mapping[str, Any]  # of each axis

    @staticmethod
    def axes_of(_arch: str) -> Mapping[str, tuple[Any, ...]]:
        return AXES

    @classmethod
    def of(cls, number: int) -> TrainingCase:
        """The case with this number; they go through rounds, as in fuzzing.py."""
        how = {"num_held": _NUM_HELD, "hold": CASES_PER_KERNEL}
        return cls(number, values_of(AXES, number, CASES_PER_ROUND, **how))

    @property
    def num_ranks(self) -> int:
        ranks = self.values["ranks"]
        return ranks if isinstance(ranks, int) else 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Its intermediate size is one that can be quantized, where it has to be."""
        local_experts, num_topk, hidden, intermediate = self.values["shape"]
        if self.values["precision"] in FP8_PRECISIONS or self.values["kept"] == "quantized":
            intermediate = align_up(intermediate, K_GROUP)
        return local_experts, num_topk, hidden, intermediate

    @property
    def steps(self) -> str | None:
        """Not every target has products of "fp8"."""
        steps: str | None = self.values["steps"]
        is_fp8 = self.values["precision"] in FP8_PRECISIONS
        return products_target().name if is_fp8 and steps is not None else steps

    @cached_property
    def inputs(self) -> tuple[torch.Tensor, Tensors, torch.Tensor]:
        """topk_idx, tensors and d_out of all ranks together."""
        local_experts, num_topk, hidden, intermediate = self.shape
        num_experts, num_tokens = local_experts * self.num_ranks, sum(self.num_tokens)
        generator = torch.Generator().manual_seed(self.number)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * scale

        scores = torch.rand(num_tokens, num_experts, generator=generator)
        topk_idx = scores.topk(num_topk).indices
        self._change_slots(topk_idx)
        topk_weights = normal(num_tokens, num_topk)
        if self.values["gates"] != "numbers":
            is_some = self.values["gates"] == "some zero"
            topk_weights[:: 2 if is_some else 1] = 0
        is_fused = self.values["w1 and w3"] == "in one"
        sizes = {
            "w1": (num_experts, hidden, intermediate * (1 + is_fused)),
            "w3": (num_experts, hidden, intermediate),
            "w2": (num_experts, intermediate, hidden),
        }
        tensors: Tensors = {
            "x": normal(num_tokens, hidden).bfloat16(),
            "topk_weights": topk_weights,
            **{n: normal(*size, scale=size[1] ** -0.5).bfloat16() for n, size in sizes.items()},
        }
        if is_fused:
            tensors["w3"] = None
        dtype = self.values["biases"]
        if dtype is not None:
            for name, size in (("b1", intermediate), ("b3", intermediate), ("b2", hidden)):
                tensors[name] = normal(num_experts, size).to(dtype)
        d_out = normal(num_tokens, hidden).bfloat16()
        return topk_idx.to(self.values["ids"]), tensors, d_out

    @cached_property
    def num_tokens(self) -> list[int]:
        """Of each rank."""
        choose = random.Random(self.number)
        return counts_of_ranks(self.values["tokens"], self.num_ranks, MAX_TOKENS, choose)

    def run(self) -> str:
        """What went wrong, "" if nothing."""
        topk_idx, tensors, d_out = self.inputs
        formula = Formula(
            self.values["activation"],
            precision=self.values["precision"],
            quantize_kept=self.values["kept"] == "quantized",
            rounds_rows=self.values["ranks"] != "one",
        )
        try:
            results = self.results()
        except RuntimeError as error:  # the emulator's findings, and waits that ran out
            return str(error)
        for name, ball in bounds_of_layer(tensors, topk_idx, d_out, formula).items():
            in_radii = ball.error_of(results[name])
            if not (in_radii <= 1).all():
                worst = in_radii.nan_to_num(torch.inf).argmax()
                value, center, radius = (
                    float(t.reshape(-1)[worst]) for t in (results[name], ball.center, ball.radius)
                )
                return f"{name}[{worst}] is {value:.6g}; right is {center:.6g} +- {radius:.2g}"
        return ""

    def results(self) -> dict[str, torch.Tensor]:
        """The output and all gradients, ranks put together."""
        if self.values["ranks"] == "one":
            return self._result_of(0, None)
        local_experts, num_topk, hidden, _ = self.shape
        num_experts = local_experts * self.num_ranks
        num_slots = self.num_ranks * MAX_TOKENS * num_topk
        group = EmulatedThroughputAllToAll(
            self.num_ranks,
            MAX_TOKENS,
            hidden,
            num_experts,
            num_topk,
            num_slots + _ALL_EXPERTS_SHARE * local_experts,
            expert_alignment=_ALL_EXPERTS_SHARE,
            num_sms=2,
            schedule_seed=self.number,
        )
        with group:
            of_ranks = run_in_threads(group, self.values["schedule"], self._result_of)
        return {name: torch.cat([own[name] for own in of_ranks]) for name in of_ranks[0]}

    def _result_of(self, rank: int, group: AllToAll | None) -> dict[str, torch.Tensor]:
        topk_idx, tensors, d_out = self.inputs
        begin = sum(self.num_tokens[:rank])
        tokens = slice(begin, begin + self.num_tokens[rank])
        num_local = self.shape[0]
        experts = slice(rank * num_local, (rank + 1) * num_local)
        own = {
            name: tensor[experts if name in _WEIGHTS else tokens].clone().requires_grad_()
            for name, tensor in tensors.items()
            if tensor is not None
        }
        kept = self.values["kept"]
        options: dict[str, Any] = {"recompute": kept in ("nothing", "received tokens only")}
        options["quantize_kept"] = kept == "quantized"
        sums = self.values["sums"]
        options["fuse_wgrad_accumulation"] = sums != "returned"
        if sums != "returned":
            for weight in (own[name] for name in _MATRICES if name in own):
                dtype = weight.dtype if sums == "grad" else torch.float32
                setattr(weight, sums, torch.zeros_like(weight, dtype=dtype))
        if group is not None:
            options["keep_received"] = kept.startswith("received")
        out = moe(
            own["x"],
            topk_idx[tokens],
            own["topk_weights"],
            own["w1"],
            own.get("w3"),
            own["w2"],
            b1=own.get("b1"),
            b3=own.get("b3"),
            b2=own.get("b2"),
            group=group,
            precision=self.values["precision"],
            activation=self.values["activation"],
            arch=self.steps,
            **options,
        )
        out.backward(d_out[tokens])
        results: dict[str, Any] = {name: tensor.grad for name, tensor in own.items()}
        if sums == "main_grad":
            results |= {name: getattr(own[name], sums) for name in _MATRICES if name in own}
        return {"out": out.detach(), **results}

    def _change_slots(self, topk_idx: torch.Tensor) -> None:
        slots = self.values["slots"]
        if slots == "unused":
            topk_idx[:, -1] = -1
        elif slots == "named twice":
            topk_idx[:, -1] = topk_idx[:, 0]
        elif slots == "none in the last token":
            topk_idx[-1:] = -1
        elif slots == "all to one expert":
            topk_idx[:] = 0


def run_in_threads(
    group: EmulatedThroughputAllToAll,
    schedule: Any,
    work: Callable[[int, AllToAll], Result],
) -> list[Result]:
    """work(rank, its AllToAll) of every rank, a thread each. A launch waits until all ranks have
    one; then one emulator runs them together. If a rank raises, its error is raised here."""
    ranks = RankThreads(len(group.layers))

    def run_all(launches: list[Launch]) -> list[None]:
        group.run([[launch] for launch in launches], schedule=schedule)
        return [None] * len(launches)

    def take_part(rank: int) -> Result:
        layer = group.layers[rank]
        layer.run = lambda launch: ranks.meet(rank, launch, run_all)  # type: ignore[method-assign]
        return work(rank, layer)

    return ranks.run(take_part)
