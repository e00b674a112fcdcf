"""Calls of a layer by the throughput path, on all ranks; emulated in this process, or with a
process for each. As split_calls.py has it for the low-latency path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep_moe.heuristics import MoEShape
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.split.throughput_moe import EXPERT_ALIGNMENT, ThroughputMoE, most_rows
from deep_moe.weights.layers import MegaMoEWeights

from .calls import Calls, RankOutput, by_call, model_inputs, rank_operands
from .rank_processes import results_of_ranks
from .split_trace import SplitTrace, newest_call
from .synthetic import LayerParts, Tokens
from .trace import record

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule

# What both kinds of kernels are told; the others are the experts'.
_OF_BOTH = ("arch", "num_sms", "schedule_seed")


def run_emulated_throughput(
    shape: MoEShape,
    layer: LayerParts,
    calls: Calls,
    *,
    max_recv_rows: int | None = None,
    **options: Any,
) -> list[list[RankOutput]]:
    """All ranks in this process, one call after the other. What each rank got, call by call.

    max_recv_rows: as of `ThroughputMoE`. options: arch, num_sms, schedule_seed, and of
    `GroupedExperts`.
    """
    with emulated_ranks(shape, layer, options, max_recv_rows=max_recv_rows) as ranks:
        return [ranks.call(tokens) for tokens in calls]


def trace_emulated_throughput(
    shape: MoEShape, layer: LayerParts, tokens: Sequence[Tokens], **options: Any
) -> list[SplitTrace]:
    """One call of `run_emulated_throughput`, recorded."""
    with (
        emulated_ranks(shape, layer, options, enable_profiling=True) as ranks,
        record(*(rank.experts.work_space for rank in ranks.layers)) as recorders,
    ):
        ranks.call(tokens)
        return [
            newest_call(rank.all_to_all, recorder)
            for rank, recorder in zip(ranks.layers, recorders, strict=True)
        ]


def run_throughput_processes(
    shape: MoEShape,
    layer: LayerParts,
    calls: Calls,
    *,
    device: str,
    max_recv_rows: int | None = None,
    **options: Any,
) -> list[list[RankOutput]]:
    """What `run_emulated_throughput` does, with one process per rank: rank r on GPU r ("cuda") or
    emulated ("cpu")."""
    of_layer = {**options, "max_recv_rows": max_recv_rows}
    return by_call(
        results_of_ranks(
            _rank_outputs, shape.num_ranks, device, shape, layer, list(map(list, calls)), of_layer
        )
    )


def trace_throughput_processes(
    shape: MoEShape,
    layer: LayerParts,
    tokens: Sequence[Tokens],
    *,
    device: str,
    num_warmup: int,
    **options: Any,
) -> list[SplitTrace]:
    """One call of `run_throughput_processes`, recorded after `num_warmup` more of the same."""
    of_layer = {**options, "enable_profiling": True}
    return results_of_ranks(
        *(_rank_trace, shape.num_ranks, device),
        *(shape, layer, list(tokens), of_layer, num_warmup),
    )


class EmulatedRanks:
    """layers: of all ranks, over one emulated all-to-all, each with its own operands."""

    def __init__(
        self,
        all_to_all: EmulatedThroughputAllToAll,
        layers: list[ThroughputMoE],
        operands: list[tuple[MegaMoEWeights, dict[str, Any]]],
    ) -> None:
        self.all_to_all = all_to_all
        self.layers = layers
        self.operands = operands

    def call(
        self,
        tokens: Sequence[Tokens],
        *,
        ids: torch.dtype = torch.int64,
        copies_rows: bool = False,
        schedule: Schedule = "random",
    ) -> list[RankOutput]:
        """What each rank got. ids: of what type topk_idx are. copies_rows: the experts' rows do not
        lie where other ranks fetch them. schedule: how warps of the all-to-all are interleaved."""
        xs = [model_inputs(own)[0] for own in tokens]
        topk_idxs = [own.topk_idx.to(ids) for own in tokens]
        dispatched = self.all_to_all.dispatch(xs, topk_idxs, schedule=schedule)
        ys = [
            layer.compute(received, weights, **biases)
            for layer, (received, _), (weights, biases) in zip(
                self.layers, dispatched, self.operands, strict=True
            )
        ]
        if copies_rows:
            ys = [y.clone() for y in ys]
        handles = [handle for _, handle in dispatched]
        factors = [own.topk_weights for own in tokens]
        outs = self.all_to_all.combine(ys, handles, topk_weights=factors, schedule=schedule)
        return [
            RankOutput(out, received.expert_count)
            for out, (received, _) in zip(outs, dispatched, strict=True)
        ]


@contextmanager
def emulated_ranks(
    shape: MoEShape,
    layer: LayerParts,
    options: Mapping[str, Any],
    *,
    max_recv_rows: int | None = None,
    expert_alignment: int = EXPERT_ALIGNMENT,
    token_format: str | None = None,
    enable_profiling: bool = False,
) -> Iterator[EmulatedRanks]:
    """The layers of all ranks. options: as of `run_emulated_throughput`. expert_alignment: as of
    `AllToAll`. token_format: in which tokens travel, by default that of the shape's."""
    of_both = {name: options[name] for name in _OF_BOTH if options.get(name) is not None}
    sizes = shape.num_ranks, shape.num_max_tokens_per_rank
    with EmulatedThroughputAllToAll(
        *sizes,
        shape.hidden,
        shape.num_experts,
        shape.num_topk,
        most_rows(*sizes, shape.num_topk) if max_recv_rows is None else max_recv_rows,
        expert_alignment=expert_alignment,
        token_format=token_format or shape.token_format,
        enable_profiling=enable_profiling,
        **of_both,
    ) as all_to_all:
        layers: list[ThroughputMoE] = []
        try:
            for own in all_to_all.layers:
                experts = {**_of_experts(shape), **options}
                layers.append(ThroughputMoE.over(own, shape.intermediate_hidden, **experts))
            cpu, arch = torch.device("cpu"), options.get("arch")
            operands = [
                rank_operands(shape, layer, rank, cpu, arch) for rank in range(shape.num_ranks)
            ]
            yield EmulatedRanks(all_to_all, layers, operands)
        finally:
            for rank in layers:
                rank.experts.close()


def _of_experts(shape: MoEShape) -> dict[str, Any]:
    return {
        "weights": shape.weights,
        "biases": shape.biases,
        "num_pool_tokens": shape.num_pool_tokens,
    }


def _rank_layer(shape: MoEShape, of_layer: Mapping[str, Any]) -> ThroughputMoE:
    """Of this process."""
    return ThroughputMoE(
        dist.group.WORLD,
        shape.num_max_tokens_per_rank,
        shape.hidden,
        shape.intermediate_hidden,
        shape.num_experts,
        shape.num_topk,
        token_format=shape.token_format,
        **_of_experts(shape),
        **of_layer,
    )


def _rank_outputs(
    device: torch.device,
    shape: MoEShape,
    layer: LayerParts,
    calls: Calls,
    of_layer: Mapping[str, Any],
) -> list[RankOutput]:
    """What this rank got, call by call."""
    rank = dist.get_rank()
    weights, biases = rank_operands(shape, layer, rank, device, of_layer.get("arch"))
    moe = _rank_layer(shape, of_layer)
    outputs = []
    for tokens in calls:
        x, ids, factors = _inputs(tokens[rank], device)
        received, handle = moe.dispatch(x, ids)
        out = moe.combine(moe.compute(received, weights, **biases), handle, factors)
        outputs.append(RankOutput(out.cpu(), received.expert_count.cpu()))
        moe.check()
    dist.barrier()  # no rank takes its memory away while another still reads it
    moe.close()
    return outputs


def _rank_trace(
    device: torch.device,
    shape: MoEShape,
    layer: LayerParts,
    tokens: Sequence[Tokens],
    of_layer: Mapping[str, Any],
    num_warmup: int,
) -> SplitTrace:
    rank = dist.get_rank()
    weights, biases = rank_operands(shape, layer, rank, device, of_layer.get("arch"))
    moe = _rank_layer(shape, of_layer)
    x, ids, factors = _inputs(tokens[rank], device)
    together = torch.zeros(1, device=device)
    with record(moe.experts.work_space) as (recorder,):
        for _ in range(num_warmup + 1):
            dist.all_reduce(together)  # so that ranks begin together
            moe(x, ids, factors, weights, **biases)
        found = newest_call(moe.all_to_all, recorder)
    moe.check()
    dist.barrier()  # as above
    moe.close()
    return found


def _inputs(
    tokens: Tokens, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx and topk_weights."""
    x = model_inputs(tokens)[0]
    return x.to(device), tokens.topk_idx.to(device), tokens.topk_weights.to(device)
