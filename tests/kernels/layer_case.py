"""One layer on emulated ranks beside its reference: what the kernel tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.fused.call_plan import EMULATED_NUM_SMS
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.fused.options import CallArguments
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.trial.bounds import Bounds, reference_bounds
from deep_moe.trial.calls import call_in_a_row, model_inputs, rank_biases
from deep_moe.trial.comparison import Comparison, compare
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import Layer, Tokens
from deep_moe.weights.transform import transform_weights_for_mega_moe
from tests.pairs import formats

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule

# Overrides: SM90's tiles that are fitted to each expert's tokens, blocks of 64, 96 or 128 rows.
FITTED = {"block_m": 128, "block_m_step": 32}

# Tokens of the layers below, where any small number will do: the number chooses the kernel, and
# tests with the same one share what has been compiled.
FEW = 20


def small_shape(weights: str, num_ranks: int = 1, **sizes: int) -> MoEShape:
    """A layer of 4 experts for 50 tokens, with an odd number of k-blocks and of Linear2's blocks,
    unless said otherwise."""
    defaults: dict[str, Any] = {
        "num_experts": 4,
        "num_topk": 2,
        "hidden": 384,
        "intermediate_hidden": 256,
        "num_max_tokens_per_rank": 50,
    }
    return MoEShape(num_ranks=num_ranks, **{**defaults, **formats(weights), **sizes})


class LayerCase:
    """The ranks of one layer with their weights; `call` runs the kernel once on all of them."""

    def __init__(self, shape: MoEShape, layer: Layer, *, arch: str = "sm_100a") -> None:
        self.shape = shape
        self.layer = layer
        self.arch = arch
        self.ranks = EmulatedRanks(shape.num_ranks, **shape.buffer_arguments)
        self.biases = rank_biases(layer, shape, arch)
        on_target = target_of(arch).weights_of(shape.weights, shape.token_format)
        self.numerics = on_target.numerics
        self.weights = [
            transform_weights_for_mega_moe(
                *layer.of_rank(rank, shape.num_ranks),
                arch=arch,
                weights=shape.weights,
                token_format=shape.token_format,
            )
            for rank in range(shape.num_ranks)
        ]

    def call(
        self,
        tokens: Sequence[Tokens],
        *,
        onto: Sequence[torch.Tensor] | None = None,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Each rank's y. It is filled with NaN before, so that a row left out is noticed. onto:
        what the call adds to, each rank's."""
        ys = []
        for buffer, mine in zip(self.ranks.buffers, tokens, strict=True):
            n = mine.num_tokens
            buffer.x[:n].copy_(mine.x)
            buffer.x_sf[:n].copy_(mine.x_sf)
            buffer.topk_idx[:n].copy_(mine.topk_idx)
            buffer.topk_weights[:n].copy_(mine.topk_weights)
            ys.append(self._empty_y(n))
        if onto is not None:
            ys = [y.clone() for y in onto]
            options["accumulate"] = True
        self.ranks.call(ys, self.weights, biases=self.biases, arch=self.arch, **options)
        return ys

    def _empty_y(self, num_tokens: int) -> torch.Tensor:
        return torch.full((num_tokens, self.shape.hidden), torch.nan, dtype=torch.bfloat16)

    def expected(
        self,
        tokens: Sequence[Tokens],
        *,
        activation_clamp: float | None = None,
        onto: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """What each rank's y has to equal where no sum is rounded."""
        ys: Sequence[torch.Tensor | None] = onto or [None] * len(tokens)
        return [
            reference_mega_moe(
                *self.layer.operands(mine),
                activation_clamp=activation_clamp,
                numerics=self.numerics,
                **self.layer.biases,
                num_shared_experts=self.shape.num_shared_experts,
                y=y,
            )
            for mine, y in zip(tokens, ys, strict=True)
        ]

    def bounds(
        self,
        tokens: Sequence[Tokens],
        *,
        activation_clamp: float | None = None,
        sum_bits: int = FP32_SUM_BITS,
        onto: Sequence[torch.Tensor] | None = None,
    ) -> list[Bounds]:
        """Of each rank's y, by default for the emulator's sums."""
        ys: Sequence[torch.Tensor | None] = onto or [None] * len(tokens)
        return [
            reference_bounds(
                *self.layer.operands(mine),
                activation_clamp=activation_clamp,
                numerics=self.numerics,
                sum_bits=sum_bits,
                **self.layer.biases,
                num_shared_experts=self.shape.num_shared_experts,
                y=y,
            )
            for mine, y in zip(tokens, ys, strict=True)
        ]

    def compare_call(
        self, tokens: Sequence[Tokens], *, activation_clamp: float | None = None, **options: Any
    ) -> list[Comparison]:
        """Call, and each rank's y beside the reference."""
        ys = self.call(tokens, activation_clamp=activation_clamp, **options)
        sum_bits = FP32_SUM_BITS
        if options.get("hopper_fp8_sums"):
            sum_bits = self.numerics.sum_bits
        bounds = self.bounds(
            tokens,
            activation_clamp=activation_clamp,
            sum_bits=sum_bits,
        )
        return [compare(y, b) for y, b in zip(ys, bounds, strict=True)]

    def compare_calls_in_a_row(
        self,
        calls: Sequence[Sequence[Tokens]],
        *,
        num_sms: Sequence[int] = (EMULATED_NUM_SMS,),
        overrides: Mapping[str, int] | None = None,
        schedule: Schedule = "random",
        schedule_seed: int = 0,
    ) -> list[list[Comparison]]:
        """What a model does: on each rank, with no look at the others, `prepare_inputs` and a call
        for each of `calls`, which names every rank's tokens. Their distances to the reference.

        num_sms: of the calls, in turn.
        """
        options = [
            CallArguments(
                arch=self.arch,
                num_sms=num_sms[call_idx % len(num_sms)],
                overrides=overrides or {},
                schedule_seed=schedule_seed,
            )
            for call_idx in range(len(calls))
        ]
        outputs = call_in_a_row(
            self.ranks, self.weights, calls, options, schedule=schedule, biases=self.biases
        )
        stats = [sum(output.stats for output in of_rank) for of_rank in zip(*outputs, strict=True)]
        self._check_what_calls_leave(calls, stats)
        return [
            [
                compare(output.y, expected)
                for output, expected in zip(
                    of_ranks, self.expected([model_inputs(own)[1] for own in tokens]), strict=True
                )
            ]
            for of_ranks, tokens in zip(outputs, calls, strict=True)
        ]

    def _check_what_calls_leave(
        self, calls: Sequence[Sequence[Tokens]], stats: Sequence[torch.Tensor]
    ) -> None:
        """Clean control words, and what each expert has received."""
        self.check_control_words()
        slots = torch.cat([mine.topk_idx.flatten() for tokens in calls for mine in tokens])
        received = torch.bincount(slots[slots >= 0], minlength=self.shape.num_experts)
        assert torch.cat(list(stats)).tolist() == received.tolist()

    def check_control_words(self) -> None:
        """A call leaves zero what the next one expects so."""
        for buffer in self.ranks.buffers:
            layout = buffer.layout
            words = buffer.memory.tensor[layout.mark("zeroed_begin") : layout.mark("zeroed_end")]
            assert not words.any(), buffer.rank
