"""Forward and backward of deep_moe.moe over several GPUs, a process for each, beside a plain layer.

    python -m benchmarks.training_ranks --json training_ranks.json
    torchrun --nproc-per-node 2 -m benchmarks.training_ranks --models fine-grained --tokens 8192

A model's experts are those of each GPU (training.MODELS), so that ranks share as many times more.
Paths:

    all_to_all     deep_moe.moe over an AllToAll: no host waits
    kept           the same with keep_received=True: tokens are not sent again in the backward pass
    process_group  deep_moe.moe over the process group
    plain          PyTorch's autograd: slots sorted, torch.distributed's all-to-all of their rows,
                   the host waiting for its sizes, grouped_mm and activation under torch.compile
    liger          with --liger: liger-cute-kernels' layer, a kernel for each pass (liger_layer.py)

Results are compared with the plain layer's before anything is timed. A time is the median of
--calls steps, paths in turn, of the slowest rank, as Python calls them; an all-reduce in front of
each lets ranks begin together. `graph_ms` is of a replayed CUDA graph of the step, which paths have
that no host waits in. `peak_gib` is what a rank allocates beyond inputs, parameters and the
AllToAll's buffers, which `buffer_gib` has, and liger's symmetric memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

import deep_moe
from deep_moe.trial.timing import machine

from . import liger_layer
from .all_to_all import timed_steps
from .mega_moe import run_on_gpus
from .training import (
    GIB,
    MODELS,
    Case,
    Model,
    as_plain,
    liger_path,
    peak_gib,
    plain_experts,
    require_close,
    weighted_sums,
)

TOKENS = (8192,)
WITHOUT_WAIT = ("all_to_all", "kept", "liger")
PATHS = ("all_to_all", "kept", "process_group", "plain")


def main() -> None:
    arguments = parse_arguments()
    run_on_gpus(run_rank, arguments.ranks or torch.cuda.device_count(), arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="per rank")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--liger", action="store_true", help="time liger-cute-kernels, too")
    parser.add_argument("--calls", type=int, default=20, help="of each path, at least")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2, help="steps before those of a round")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    if min(arguments.calls, arguments.rounds, *arguments.tokens) < 1:
        parser.error("--tokens, --calls and --rounds must be at least 1")
    return arguments


class PlainLayer:
    """As one writes it over torch.distributed. One rank's part."""

    def __init__(self, num_experts: int) -> None:
        """num_experts: of this rank."""
        self._num_experts = num_experts
        self._experts = torch.compile(plain_experts)

    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> torch.Tensor:
        num_ranks, num_topk = dist.get_world_size(), topk_idx.shape[1]
        group = dist.group.WORLD
        assert group is not None
        experts = topk_idx.reshape(-1)
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=num_ranks * self._num_experts)
        arriving = torch.empty_like(counts)  # by source rank, then by expert
        dist.all_to_all_single(arriving, counts)
        arriving = arriving.view(num_ranks, self._num_experts)
        # What the collective wants to know on the host.
        sent = counts.view(num_ranks, -1).sum(1).tolist()
        received = arriving.sum(1).tolist()

        rows = all_to_all_single_autograd(x[order // num_topk], received, sent, group)
        expert_of_row = torch.arange(self._num_experts, device=x.device).repeat(num_ranks)
        by_expert = expert_of_row.repeat_interleave(
            arriving.flatten(), output_size=sum(received)
        ).argsort(stable=True)
        offs = arriving.sum(0).cumsum(0).int()
        y = self._experts(rows[by_expert], w13, w2, offs)
        y = torch.empty_like(y).index_copy(0, by_expert, y)
        y = all_to_all_single_autograd(y, sent, received, group)
        return weighted_sums(y, order, topk_weights)


def own_case(model: Model, num_tokens: int, device: torch.device) -> Case:
    """This rank's tokens, for all ranks' experts, and its own experts."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    return Case.random(model, num_tokens, device, seed=rank, num_ranks=num_ranks)


def most_rows(case: Case) -> int:
    """That any rank receives, each expert's padded to 8."""
    num_experts = case.model.num_experts * dist.get_world_size()
    counts = case.topk_idx.flatten().bincount(minlength=num_experts)
    dist.all_reduce(counts)
    return int(counts.add(7).floor_divide(8).mul(8).view(dist.get_world_size(), -1).sum(1).max())


def paths_of(case: Case, layer: deep_moe.AllToAll) -> dict[str, Callable[[], Any]]:
    plain = PlainLayer(case.model.num_experts)
    return {
        "all_to_all": case.our_step(group=layer),
        "kept": case.our_step(group=layer, keep_received=True),
        "process_group": case.our_step(group=dist.group.WORLD),
        "plain": case.step(plain, case.w13, case.w2),
    }


def check(paths: dict[str, Callable[[], Any]]) -> None:
    """Ours against the plain layer, as norms: BF16 rounds all a few times."""
    plain = paths["plain"]()
    for path, call in paths.items():
        require_close(path, as_plain(path, call()), plain)


def run_rank(
    device: torch.device, arguments: argparse.Namespace, models: dict[str, Model] = MODELS
) -> None:
    """One process: all models and sizes."""
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "num_ranks": dist.get_world_size(),
        "results": [],
    }
    with ExitStack() as stack:
        if arguments.liger:
            stack.enter_context(liger_layer.runtime(device))
        for name in arguments.models:
            for num_tokens in arguments.tokens:
                torch._dynamo.reset()
                result = result_of(models[name], num_tokens, device, arguments)
                report["results"].append({"model": name, **asdict(models[name]), **result})
                if dist.get_rank() == 0:
                    print(lines(report["results"][-1]), flush=True)
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


@contextmanager
def liger_paths(case: Case, device: torch.device) -> Iterator[dict[str, Callable[[], Any]]]:
    """Its path, and the memory for it."""
    num_ranks, model = dist.get_world_size(), case.model
    with liger_layer.configured(
        device,
        num_tokens=case.x.shape[0],
        hidden=model.hidden,
        num_experts=num_ranks * model.num_experts,
        num_topk=model.num_topk,
    ) as calls:
        yield {"liger": liger_path(case, calls, num_ranks)}


def result_of(
    model: Model, num_tokens: int, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    case = own_case(model, num_tokens, device)
    layer = deep_moe.AllToAll(
        dist.group.WORLD,
        num_tokens,
        model.hidden,
        model.num_experts * num_ranks,
        model.num_topk,
        most_rows(case),
        expert_alignment=8,
        device=device,
    )
    try:
        with ExitStack() as stack:
            paths = paths_of(case, layer)
            if arguments.liger:
                paths |= stack.enter_context(liger_paths(case, device))
            results = _results(paths, device, arguments)
        layer.check()
    finally:
        dist.barrier()
        layer.close()
    return {"tokens_per_rank": num_tokens, "buffer_gib": layer.nbytes / GIB, "paths": results}


def _results(
    paths: dict[str, Callable[[], Any]], device: torch.device, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """By path, checked before."""
    check(paths)
    results: dict[str, dict[str, float]] = {name: {} for name in paths}
    if device.type == "cuda":
        for name, call in paths.items():
            results[name]["peak_gib"] = peak_gib(call)
    for name, times in timed_steps(paths, arguments, device).items():
        results[name] |= in_ms(times, "ms")
    if device.type == "cuda":
        replays = {name: captured(paths[name]) for name in WITHOUT_WAIT if name in paths}
        for name, times in timed_steps(replays, arguments, device).items():
            results[name] |= in_ms(times, "graph_ms")
        torch.cuda.synchronize(device)
    return results


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    dist.barrier()
    return graph.replay


def in_ms(times: dict[str, Any], name: str) -> dict[str, float]:
    ends = {"": "us", "_p10": "us_p10", "_p90": "us_p90"}
    return {name + end: round(1e-3 * times[key], 4) for end, key in ends.items()}


def lines(result: dict[str, Any]) -> str:
    """A result for people."""
    plain = result["paths"]["plain"]["ms"]
    head = f"{result['model']}, {result['tokens_per_rank']} tokens/rank"
    rows = [head]
    for name, found in result["paths"].items():
        words = [f"  {name:14} {found['ms']:9.3f} ms ({plain / found['ms']:.2f}x)"]
        if "graph_ms" in found:
            words.append(f"{found['graph_ms']:9.3f} ms in a graph")
        if "peak_gib" in found:
            words.append(f"{found['peak_gib']:7.2f} GiB")
        rows.append("  ".join(words))
    return "\n".join(rows)


if __name__ == "__main__":
    main()
