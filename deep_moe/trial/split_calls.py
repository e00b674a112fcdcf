"""Calls of a layer by the split path: a low-latency dispatch, the experts, and a combine, on all
ranks; emulated in this process, or with a process for each. As calls.py has it for the fused one.

Tokens are quantized by the dispatch, so that ranks bring the tokens' values in BF16: see
`model_inputs` for what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.heuristics import MoEShape
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.split.grouped_experts import GroupedExperts
from deep_moe.split.handle import Dispatched
from deep_moe.split.low_latency import LowLatencyAllToAll

from .calls import Calls, RankOutput, by_call, model_inputs, rank_operands
from .rank_processes import results_of_ranks
from .synthetic import Layer, Tokens

# What both kinds of kernels are told; the others are the experts'.
_OF_BOTH = ("arch", "num_sms", "schedule_seed")


def max_received_rows(shape: MoEShape) -> int:
    """Rows of all experts of a rank: a token comes once to each of them that it names."""
    per_token = min(shape.num_topk, shape.num_experts_per_rank)
    return shape.num_ranks * shape.num_max_tokens_per_rank * per_token


def received_rows(shape: MoEShape, tokens: Sequence[Tokens]) -> torch.Tensor:
    """int32 [experts]: tokens of all ranks that name each, however often."""
    counts = torch.zeros(shape.num_experts, dtype=torch.int32)
    for own in tokens:
        for expert in range(shape.num_experts):
            counts[expert] += int((own.topk_idx == expert).any(dim=1).sum())
    return counts


def run_emulated_split(
    shape: MoEShape, layer: Layer, calls: Calls, **options: Any
) -> list[list[RankOutput]]:
    """All ranks in this process, one call after the other. What each rank got, call by call.
    options: arch, num_sms, schedule_seed, and of `GroupedExperts`."""
    how = _all_to_all_options(shape, options)
    with EmulatedAllToAll(*all_to_all_sizes(shape), **how) as all_to_all:
        ranks = [
            RankExperts(shape, layer, rank, torch.device("cpu"), options)
            for rank in range(shape.num_ranks)
        ]
        try:
            return [_call_emulated(all_to_all, ranks, tokens) for tokens in calls]
        finally:
            for rank in ranks:
                rank.experts.close()


def run_split_processes(
    shape: MoEShape, layer: Layer, calls: Calls, *, device: str, **options: Any
) -> list[list[RankOutput]]:
    """What `run_emulated_split` does, with one process per rank: rank r on GPU r ("cuda") or
    emulated ("cpu")."""
    return by_call(
        results_of_ranks(
            _rank_outputs, shape.num_ranks, device, shape, layer, list(map(list, calls)), options
        )
    )


class RankExperts:
    """One rank's experts, with their weights. options: of `GroupedExperts`; token_format is by
    default that of the shape."""

    def __init__(
        self,
        shape: MoEShape,
        layer: Layer,
        rank: int,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        self.weights, self.biases = rank_operands(shape, layer, rank, device, options.get("arch"))
        self.experts = GroupedExperts(
            max_received_rows(shape),
            shape.hidden,
            shape.intermediate_hidden,
            shape.num_experts_per_rank,
            weights=shape.weights,
            biases=shape.biases,
            num_pool_tokens=shape.num_pool_tokens,
            device=device,
            **{"token_format": shape.token_format, **options},
        )

    def __call__(
        self,
        dispatched: Dispatched,
        out: torch.Tensor | None = None,
        *,
        behind_each_other: bool = False,
    ) -> torch.Tensor:
        """Rows of y where recv_x has them. behind_each_other: told as rows of all experts, and
        where each of them begins."""
        x, scales, begin = dispatched.recv_x, dispatched.scales, None
        size = x.shape
        if behind_each_other:
            begin = torch.arange(0, size[0] * size[1], size[1], dtype=torch.int32, device=x.device)
            x = x.flatten(0, 1)
            scales, out = (None if t is None else t.flatten(0, 1) for t in (scales, out))
        count = dispatched.recv_count
        y = self.experts(x, scales, self.weights, count, begin, out, **self.biases)
        return y.view(size)


def _call_emulated(
    all_to_all: EmulatedAllToAll, ranks: Sequence[RankExperts], tokens: Sequence[Tokens]
) -> list[RankOutput]:
    ids = [own.topk_idx for own in tokens]
    weights = [own.topk_weights for own in tokens]
    dispatched = all_to_all.dispatch([model_inputs(own)[0] for own in tokens], ids)
    ys = [rank(result) for rank, result in zip(ranks, dispatched, strict=True)]
    outs = all_to_all.combine(ys, ids, weights, [result.handle for result in dispatched])
    return [
        RankOutput(out, result.recv_count) for out, result in zip(outs, dispatched, strict=True)
    ]


def _rank_outputs(
    device: torch.device,
    shape: MoEShape,
    layer: Layer,
    calls: Calls,
    options: Mapping[str, Any],
) -> list[RankOutput]:
    rank = dist.get_rank()
    how = _all_to_all_options(shape, options)
    all_to_all = LowLatencyAllToAll(dist.group.WORLD, *all_to_all_sizes(shape)[1:], **how)
    own_experts = RankExperts(shape, layer, rank, device, options)
    outputs = []
    for tokens in calls:
        own = tokens[rank]
        ids, weights = own.topk_idx.to(device), own.topk_weights.to(device)
        result = all_to_all.dispatch(model_inputs(own)[0].to(device), ids)
        out = all_to_all.combine(own_experts(result), ids, weights, result.handle)
        outputs.append(RankOutput(out.cpu(), result.recv_count.cpu()))
        all_to_all.check()
        own_experts.experts.check()
    dist.barrier()  # no rank takes its memory away while another still reads it
    return outputs


def all_to_all_sizes(shape: MoEShape) -> tuple[int, int, int, int, int]:
    return (
        shape.num_ranks,
        shape.num_max_tokens_per_rank,
        shape.hidden,
        shape.num_experts,
        shape.num_topk,
    )


def _all_to_all_options(shape: MoEShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens as the experts take them, and what both kinds of kernels are told."""
    of_both = {name: options[name] for name in _OF_BOTH if options.get(name) is not None}
    return {"token_format": shape.token_format, **of_both}
