"""The paths on which a layer is tested, one object each: its calls on all ranks, and their expected
results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from deep_moe.heuristics import MoEShape

from . import calls as fused_calls
from . import split_calls, throughput_calls, two_level
from .bounds import Bounds, reference_bounds
from .calls import Calls, RankOutput
from .comparison import Comparison, compare
from .synthetic import Layer, Tokens, received


@dataclass(frozen=True)
class Where:
    """device: "cpu", emulated, or "cuda". in_processes: with a process for each rank, which GPUs
    have anyway. progress: told how many warp instructions the emulator has executed."""

    device: str = "cpu"
    in_processes: bool = False
    progress: Callable[[int], None] | None = None

    @property
    def has_processes(self) -> bool:
        return self.in_processes or self.device == "cuda"


class LayerPath(ABC):
    """words: for people. takes_bf16: ranks bring the values of their tokens in BF16, which the path
    quantizes. weights_in_combine: as of `reference_bounds`."""

    words: ClassVar[str]
    takes_bf16: ClassVar[bool] = True
    weights_in_combine: ClassVar[bool] = False

    @abstractmethod
    def outputs(
        self, shape: MoEShape, layer: Layer, calls: Calls, where: Where, **options: Any
    ) -> list[list[RankOutput]]:
        """What each rank got, call by call. options: of the call, and accumulate where the path
        has it."""

    def received(self, shape: MoEShape, tokens: Sequence[Tokens]) -> torch.Tensor:
        """int32 [experts]: what each is to get of all ranks' tokens."""
        return received(shape, tokens)

    def bounds(
        self, shape: MoEShape, rank: int, layer: Layer, tokens: Tokens, **how: Any
    ) -> Bounds:
        """Of one rank's output. how: further arguments of `reference_bounds`."""
        of_operands: Callable[..., Bounds] = partial(reference_bounds, *layer.operands(tokens))
        return of_operands(
            num_shared_experts=shape.num_shared_experts,
            weights_in_combine=self.weights_in_combine,
            **layer.biases,
            **how,
        )


class FusedPath(LayerPath):
    words = "fused kernel"
    takes_bf16 = False

    def outputs(
        self, shape: MoEShape, layer: Layer, calls: Calls, where: Where, **options: Any
    ) -> list[list[RankOutput]]:
        if where.has_processes:
            return fused_calls.run_processes(shape, layer, calls, device=where.device, **options)
        return fused_calls.run_emulated_ranks(
            shape, layer, calls, progress=where.progress, **options
        )


class LowLatencyPath(LayerPath):
    words = "split path"
    weights_in_combine = True

    def outputs(
        self, shape: MoEShape, layer: Layer, calls: Calls, where: Where, **options: Any
    ) -> list[list[RankOutput]]:
        if where.has_processes:
            return split_calls.run_split_processes(
                shape, layer, calls, device=where.device, **options
            )
        return split_calls.run_emulated_split(shape, layer, calls, **options)

    def received(self, shape: MoEShape, tokens: Sequence[Tokens]) -> torch.Tensor:
        return split_calls.received_rows(shape, tokens)


@dataclass(frozen=True)
class ThroughputPath(LayerPath):
    """max_recv_rows: as of `ThroughputMoE`."""

    words: ClassVar[str] = "throughput path"
    weights_in_combine: ClassVar[bool] = True

    max_recv_rows: int | None = None

    def outputs(
        self, shape: MoEShape, layer: Layer, calls: Calls, where: Where, **options: Any
    ) -> list[list[RankOutput]]:
        options["max_recv_rows"] = self.max_recv_rows
        if where.has_processes:
            return throughput_calls.run_throughput_processes(
                shape, layer, calls, device=where.device, **options
            )
        return throughput_calls.run_emulated_throughput(shape, layer, calls, **options)


@dataclass(frozen=True)
class TwoLevelPath(LayerPath):
    """As of `TwoLevelMoE`; its ranks are always processes."""

    words: ClassVar[str] = "two-level path"

    num_domains: int
    num_chunks: int = 1
    exact_sizes: bool = False

    def outputs(
        self, shape: MoEShape, layer: Layer, calls: Calls, where: Where, **options: Any
    ) -> list[list[RankOutput]]:
        how = {"num_chunks": self.num_chunks, "exact_sizes": self.exact_sizes}
        return two_level.run_two_level(
            *(shape, self.num_domains, layer, calls),
            device=where.device,
            two_level=how,
            **options,
        )

    def bounds(
        self, shape: MoEShape, rank: int, layer: Layer, tokens: Tokens, **how: Any
    ) -> Bounds:
        domain = rank * self.num_domains // shape.num_ranks
        return two_level.two_level_bounds(shape, self.num_domains, domain, layer, tokens, **how)


@dataclass(frozen=True)
class Verdict:
    """On one rank's output of one call."""

    call: int
    rank: int
    num_received: int
    stats_agree: bool
    comparison: Comparison

    @property
    def passed(self) -> bool:
        return self.stats_agree and self.comparison.is_right

    def as_dict(self) -> dict[str, Any]:
        own = {"call": self.call, "rank": self.rank, "num_received": self.num_received}
        own["stats_agree"] = self.stats_agree
        return {**own, **asdict(self.comparison), "passed": self.passed}


def verdicts(
    path: LayerPath,
    shape: MoEShape,
    layer: Layer,
    calls: Calls,
    outputs: Sequence[Sequence[RankOutput]],
    *,
    is_exact: bool,
    accumulates: bool = False,
    **how: Any,
) -> Iterator[Verdict]:
    """On what `path.outputs` gave. is_exact: bit for bit, else within bounds. how: further
    arguments of `LayerPath.bounds`."""
    for call_idx, (tokens, of_call) in enumerate(zip(calls, outputs, strict=True)):
        sent = path.received(shape, tokens).split(shape.num_experts_per_rank)
        for rank, (own, output) in enumerate(zip(tokens, of_call, strict=True)):
            if accumulates:
                how["y"] = fused_calls.initial_y(own.num_tokens, shape.hidden)
            bounds = path.bounds(shape, rank, layer, own, **how)
            yield Verdict(
                call_idx,
                rank,
                int(output.stats.sum()),
                torch.equal(output.stats, sent[rank]),
                compare(output.y, bounds.y if is_exact else bounds),
            )
