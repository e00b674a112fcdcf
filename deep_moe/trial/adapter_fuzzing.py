"""Cases of `deep-moe fuzz` for what adapters do with the tokens of ranks in front of the fused call
(`integrations/shares.py`): ranks that hold the same tokens call it with a share each, ranks with
more tokens than go into one call make several, and each chooses its kernel by how many tokens it
expects. See fuzzing.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.fused.call_tensors import with_statistics
from deep_moe.fused.emulated_call import prepare_launch
from deep_moe.fused.emulated_ranks import EmulatedRanks, run_ranks
from deep_moe.fused.input_preparation import prepare_inputs
from deep_moe.fused.mega_moe import with_numerics
from deep_moe.fused.options import given_options
from deep_moe.integrations.shares import mean_tokens, on_own_share, rows_of_calls

from .calls import RankOutput, model_inputs, transformed_weights
from .fuzzing import FuzzCase, axes
from .rank_threads import RankThreads
from .synthetic import Layer, Tokens

_CHUNK = 24  # tokens of a call, where there are several
_IDS = (torch.int64, torch.int32)
_ROUTING_WEIGHTS = (torch.float32, torch.bfloat16)
_IN_TURN = "in turn"


@lru_cache
def adapter_axes(arch: str) -> dict[str, tuple[Any, ...]]:
    """What cases of an architecture differ in; where it says nothing, as in the fused call's."""
    fused = axes(arch)
    return {
        "weights": fused["weights"],
        # Ranks, experts, top-k, hidden, intermediate.
        "shape": ((2, 4, 3, 256, 96), (4, 8, 2, 256, 128)),
        # So far all is compiled in.
        # Ranks that hold the same tokens.
        "same tokens": ("none", "pairs", "all"),
        "calls": ("one", "several"),
        # The mean of the ranks, or each rank knows its own number only.
        "expected": ("known", "unknown"),
        # In both steps the same, or not.
        "ids": (*_IDS, _IN_TURN),
        "routing weights": (*_ROUTING_WEIGHTS, _IN_TURN),
        "tokens": fused["tokens"],
        "slots": fused["slots"],
        "values": fused["values"],
        "schedule": SCHEDULES,
    }


@dataclass(frozen=True)
class AdapterCase(FuzzCase):
    """Two steps of a model, on inputs in BF16."""

    path: ClassVar[str] = "adapters"
    num_held: ClassVar[int] = 2

    @staticmethod
    def axes_of(arch: str) -> dict[str, tuple[Any, ...]]:
        return adapter_axes(arch)

    @property
    def is_prepared(self) -> bool:
        return True

    @property
    def num_sharers(self) -> int:
        """Ranks that hold the same tokens."""
        return {"none": 1, "pairs": 2, "all": self.shape.num_ranks}[self.values["same tokens"]]

    def inputs(self) -> list[list[Tokens]]:
        """Each rank's, those of the first one for all that hold the same."""
        return [
            [tokens[rank - rank % self.num_sharers] for rank in range(len(tokens))]
            for tokens in super().inputs()
        ]

    def received(self, tokens: Sequence[Tokens]) -> torch.Tensor:
        return super().received(tokens[:: self.num_sharers])

    @cached_property
    def chunk(self) -> int:
        """Most tokens of one call."""
        return _CHUNK if self.values["calls"] == "several" else self.shape.num_max_tokens_per_rank

    def _outputs(self, layer: Layer, calls: Sequence[Sequence[Tokens]]) -> list[list[RankOutput]]:
        kernel = _Kernel(self, layer)
        try:
            return [
                self._step(kernel, tokens, self._kinds(idx)) for idx, tokens in enumerate(calls)
            ]
        finally:
            kernel.ranks.close()

    def _kinds(self, step_idx: int) -> list[torch.dtype]:
        """Of ids and routing weights."""
        return [
            kinds[step_idx] if self.values[axis] == _IN_TURN else self.values[axis]
            for axis, kinds in (("ids", _IDS), ("routing weights", _ROUTING_WEIGHTS))
        ]

    def _step(
        self, kernel: _Kernel, tokens: Sequence[Tokens], kinds: Sequence[torch.dtype]
    ) -> list[RankOutput]:
        threads, num_sharers = RankThreads(len(tokens)), self.num_sharers
        shares = [-(-own.num_tokens // num_sharers) for own in tokens]
        counts = [own.num_tokens for own in tokens[::num_sharers]]

        def of_rank(rank: int) -> RankOutput:
            own = tokens[rank]
            y = torch.full((own.num_tokens, self.shape.hidden), torch.nan, dtype=torch.bfloat16)
            stats = torch.zeros(self.shape.num_experts_per_rank, dtype=torch.int32)
            expected = mean_tokens(
                counts if self.values["expected"] == "known" else None,
                shares[rank],
                num_sharers=num_sharers,
            )

            def run(
                output: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
            ) -> None:
                for rows in rows_of_calls(max(shares), self.chunk):
                    call = _Call(output[rows], x[rows], ids[rows], weights[rows], stats, expected)
                    threads.meet(rank, call, kernel.run)

            ids, weights = own.topk_idx.to(kinds[0]), own.topk_weights.to(kinds[1])
            on_own_share(
                _Sharers(threads, rank, num_sharers),
                num_sharers,
                y,
                model_inputs(own)[0],
                ids,
                weights,
                run,
            )
            return RankOutput(y, stats)

        return threads.run(of_rank)


@dataclass(frozen=True)
class _Sharers:
    """The ranks that hold the same tokens as `rank`, a thread each."""

    threads: RankThreads
    rank: int
    num_sharers: int

    @property
    def rank_in_group(self) -> int:
        return self.rank % self.num_sharers

    def all_gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        first = self.rank - self.rank_in_group
        members = range(first, first + self.num_sharers)
        return self.threads.meet(
            self.rank, own, lambda parts: [torch.cat(parts, dim)] * len(parts), members
        )


class _Call(NamedTuple):
    """A rank's, of the kernel. stats: counted up."""

    y: torch.Tensor
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    stats: torch.Tensor
    expected: int


class _Kernel:
    """A layer on all ranks, in buffers that hold the tokens of one call."""

    def __init__(self, case: AdapterCase, layer: Layer) -> None:
        shape = replace(case.shape, num_max_tokens_per_rank=case.chunk)
        self.case = case
        self.ranks = EmulatedRanks(shape.num_ranks, **shape.buffer_arguments)
        self.weights = transformed_weights(shape, layer, case.arch)

    def run(self, calls: Sequence[_Call]) -> list[None]:
        """One call of all ranks."""
        case, launches = self.case, []
        for buffer, weights, call in zip(self.ranks.buffers, self.weights, calls, strict=True):
            prepare_inputs(call.x, call.topk_idx, call.topk_weights, buffer, arch=case.arch)
            expected = min(max(call.expected, 1), case.chunk)
            given = given_options(
                "run", {"arch": case.arch, "num_sms": 4, "expected_tokens_per_rank": expected}
            )
            tensors = with_statistics(call.stats)
            options = with_numerics(given, case.activation, None, True)
            launches.append(
                prepare_launch(call.y, weights.l1, weights.l2, buffer, tensors, options)
            )
        run_ranks(
            self.ranks.buffers,
            launches,
            range(len(launches)),
            seed=case.number,
            schedule=case.values["schedule"],
            checked=True,
        )
        return [None] * len(launches)
