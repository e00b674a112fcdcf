"""Calls of a layer over several domains, one process per rank, and their expected results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.heuristics import MoEShape
from deep_moe.split.domain_groups import make_domain_groups
from deep_moe.split.two_level import TwoLevelMoE

from .bounds import Bounds, reference_bounds, sum_of_domains
from .calls import Calls, RankOutput, by_call, model_inputs, rank_operands
from .rank_processes import results_of_ranks
from .synthetic import Layer, Tokens


def run_two_level(
    shape: MoEShape,
    num_domains: int,
    layer: Layer,
    calls: Calls,
    *,
    device: str,
    two_level: Mapping[str, Any],
    **options: Any,
) -> list[list[RankOutput]]:
    """Every call's output of each rank, domain after domain.

    shape: of the whole layer, as if all its ranks were one domain. calls: of every call, each
    rank's tokens, whose values in BF16 are the input (`model_inputs`). device: "cpu" or "cuda".
    two_level: further arguments of `TwoLevelMoE`. options: of its `call`.
    """
    if shape.num_ranks % num_domains:
        raise ValueError(
            f"num_domains must divide the {shape.num_ranks} ranks there are; got {num_domains}"
        )
    return by_call(
        results_of_ranks(
            *(_run_rank, shape.num_ranks, device, shape, num_domains, layer),
            *(list(map(list, calls)), dict(two_level), options),
        )
    )


def _run_rank(
    device: torch.device,
    shape: MoEShape,
    num_domains: int,
    layer: Layer,
    calls: Calls,
    two_level: dict[str, Any],
    options: dict[str, Any],
) -> list[RankOutput]:
    rank = dist.get_rank()
    moe = make_layer(shape, num_domains, device, **two_level)
    weights, biases = rank_operands(shape, layer, rank, device, options.get("arch"))
    outputs = []
    for tokens in calls:
        own = tokens[rank]
        stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32, device=device)
        x = model_inputs(own)[0].to(device)
        routing = own.topk_idx.to(device), own.topk_weights.to(device)
        given: dict[str, Any] = {**biases, **options}
        y = moe.call(x, *routing, weights, stats, **given)
        moe.check()
        outputs.append(RankOutput(y.cpu(), stats.cpu()))
    dist.barrier()  # no rank takes its memory away while another still reads it
    moe.close()
    return outputs


def make_layer(
    shape: MoEShape, num_domains: int, device: torch.device, **arguments: Any
) -> TwoLevelMoE:
    """This process's part of the layer, whose ranks are all of the default group."""
    return TwoLevelMoE(
        *make_domain_groups(num_domains),
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
        weights=shape.weights,
        token_format=shape.token_format,
        biases=shape.biases,
        num_shared_experts=shape.num_shared_experts,
        num_pool_tokens=shape.num_pool_tokens,
        device=device,
        **arguments,
    )


def two_level_bounds(
    shape: MoEShape, num_domains: int, domain: int, layer: Layer, tokens: Tokens, **how: Any
) -> Bounds:
    """Bounds of the outputs for tokens of a rank in `domain`. how: further arguments of
    `reference_bounds`."""
    number = shape.num_experts // num_domains
    parts = []
    for other in range(num_domains):
        ids = tokens.topk_idx
        ids = ids.where((ids >= other * number) & (ids < (other + 1) * number), -1)
        num_shared = shape.num_shared_experts if other == domain else 0
        kept = slice(shape.num_experts + num_shared)
        given: dict[str, Any] = {
            name: bias if bias is None else bias[kept] for name, bias in layer.biases.items()
        }
        parts.append(
            reference_bounds(
                tokens.x,
                tokens.x_sf,
                ids,
                tokens.topk_weights,
                tuple(tensor[kept] for tensor in layer.l1),
                tuple(tensor[kept] for tensor in layer.l2),
                num_shared_experts=num_shared,
                **{**given, **how},
            )
        )
    return sum_of_domains(parts)
