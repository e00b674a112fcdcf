"""`deep-moe config --path`: what a call costs on one of the paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from .options import make_shape
from .output import format_bytes, new_table, print_json, stdout

if TYPE_CHECKING:
    from deep_moe.heuristics.path_costs import PathCost


def print_path_cost(
    path: str,
    num_ranks: int,
    num_tokens: int,
    num_max_tokens: int,
    sizes: Mapping[str, Any],
    between: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """sizes: of `make_shape`. between: of domains, for the path two-level."""
    if not 0 <= num_tokens <= num_max_tokens:
        raise typer.BadParameter(
            f"--tokens must be 0 to --max-tokens {num_max_tokens}; got {num_tokens}"
        )
    cost = path_cost(path, num_ranks, num_tokens, num_max_tokens, sizes, between)
    if as_json:
        print_json({**asdict(cost), "is_estimate": True})
        return
    console = stdout()
    console.print(f"{cost.path}, {cost.num_tokens} tokens per rank", style="bold")
    for name, num_bytes in cost.buffer_bytes.items():
        console.print(f"{name}: {num_bytes} bytes ({format_bytes(num_bytes)}) per rank")
    console.print(f"over NVLink, each way: {format_bytes(round(cost.link_bytes))} per rank")
    if cost.network_bytes:
        size = format_bytes(round(cost.network_bytes))
        console.print(f"to other domains, each way: {size} per rank")
    steps = new_table(
        f"estimated: {cost.us:.0f} us",
        "step",
        "us",
        "how",
        right=("us",),
        whole=("step",),
    )
    for step in cost.steps:
        steps.add_row(step.name, f"{step.us:.1f}", step.how)
    console.print(steps)


def path_cost(
    path: str,
    num_ranks: int,
    num_tokens: int,
    num_max_tokens: int,
    sizes: Mapping[str, Any],
    between: Mapping[str, Any],
) -> PathCost:
    """Of a call in which each rank brings so many tokens. The split path is the low-latency one, or
    for buffers of more tokens than it takes the throughput one."""
    from deep_moe.heuristics.low_latency import MAX_TOKENS_PER_RANK
    from deep_moe.heuristics.path_costs import (
        fused_cost,
        low_latency_cost,
        throughput_cost,
        two_level_cost,
    )
    from deep_moe.heuristics.two_level import TwoLevelShape

    if path == "two-level":
        num_domains = between["num_domains"]
        if num_ranks % num_domains:
            raise typer.BadParameter(
                f"--ranks must be a multiple of --domains {num_domains}; got {num_ranks}"
            )
        # The whole layer has more ranks than one domain may have.
        one = make_shape(ranks=1, max_tokens=num_max_tokens, **_without_pool(sizes))
        experts = one.num_experts if sizes["model"] or sizes["experts"] else 4 * num_ranks
        shape = TwoLevelShape(
            num_ranks=num_ranks // num_domains,
            num_experts=experts,
            num_topk=one.num_topk,
            hidden=one.hidden,
            intermediate_hidden=one.intermediate_hidden,
            num_max_tokens_per_rank=num_max_tokens,
            weights=one.weights,
            biases=one.biases,
            num_shared_experts=one.num_shared_experts,
            num_pool_tokens=sizes["pool_tokens"],
            **between,
        )
        return two_level_cost(shape, num_tokens)
    shape_of_one = make_shape(ranks=num_ranks, max_tokens=num_max_tokens, **sizes)
    if path == "fused":
        return fused_cost(shape_of_one, num_tokens)
    if num_max_tokens > MAX_TOKENS_PER_RANK:
        return throughput_cost(shape_of_one, num_tokens)
    return low_latency_cost(shape_of_one, num_tokens)


def _without_pool(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The pool is of one domain."""
    return {**sizes, "pool_tokens": None}
