"""Forward and backward of layers whose weights FSDP2 shards over several GPUs, a process for each.

    python -m benchmarks.training_sharded --json training_sharded.json
    python -m benchmarks.training_sharded --models qwen3-235b --tokens 8192 --layers 4

Each GPU has all experts of a model (training.MODELS), its own tokens, and shards of the weights.
`fully_shard` gathers a layer's weights for the forward pass and again for the backward pass, and
brings gradients together. Paths:

    bf16        precision="bf16"
    fp8-wgrad   precision="fp8_wgrad": gathers BF16, and each GPU quantizes all of it
    gathered    the same with quantize_gathered=True: each GPU quantizes its shard, E4M3 travels

Output and gradients of the last two have the same bits, or nothing is timed. A time is the median
of --calls steps of all layers, paths in turn, of the slowest rank. `gather_ms` is of gathering all
layers' weights once, with nothing beside. `peak_gib` is what a step allocates on a GPU beyond
weights and tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import deep_moe
from deep_moe.trial.timing import machine

from .all_to_all import timed_steps
from .mega_moe import run_on_gpus
from .training import MODELS, Model, peak_gib
from .training_ranks import in_ms

PATHS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8-wgrad": {"precision": "fp8_wgrad"},
    "gathered": {"precision": "fp8_wgrad", "quantize_gathered": True},
}
SAME_BITS = ("fp8-wgrad", "gathered")


def main() -> None:
    arguments = parse_arguments()
    run_on_gpus(run_rank, arguments.ranks or torch.cuda.device_count(), arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["qwen3-235b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="per rank")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--calls", type=int, default=10, help="of each path, at least")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="steps before those of a round")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    if min(arguments.layers, arguments.calls, arguments.rounds, *arguments.tokens) < 1:
        parser.error("--tokens, --layers, --calls and --rounds must be at least 1")
    return arguments


class Layers(nn.Module):
    """So many layers behind each other, sharded one by one."""

    def __init__(self, model: Model, num_layers: int, device: torch.device, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (model.hidden, model.intermediate, model.num_experts)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            layer = deep_moe.MoELayer(*sizes, fuse_w1_w3=True, device=device, **options)
            fully_shard(layer, reshard_after_forward=True)
            self.layers.append(layer)
        fully_shard(self)

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *routing)
        return x

    def gather(self) -> None:
        for layer in self.layers:
            layer.unshard()  # type: ignore[operator]
            layer.reshard()  # type: ignore[operator]


class Case:
    """A rank's tokens, and a step for any layers."""

    def __init__(self, model: Model, num_tokens: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        form: dict[str, Any] = {"device": device, "generator": generator}
        scores = torch.rand(num_tokens, model.num_experts, **form)
        self.topk_weights, self.topk_idx = scores.softmax(-1).topk(model.num_topk)
        self.x = torch.randn(num_tokens, model.hidden, **form).bfloat16()
        self.d_out = torch.randn(num_tokens, model.hidden, **form).bfloat16()

    def step(self, layers: Layers) -> torch.Tensor:
        out: torch.Tensor = layers(self.x, self.topk_idx, self.topk_weights)
        out.backward(self.d_out)
        return out.detach()

    def results(self, layers: Layers) -> list[torch.Tensor]:
        """The output, and this rank's shards of the gradients."""
        found = [self.step(layers)]
        found += [weight.grad.to_local() for weight in layers.parameters()]  # type: ignore[union-attr]
        layers.zero_grad()
        return found

    def steps(self, layers: dict[str, Layers]) -> dict[str, Callable[[], None]]:
        def of(own: Layers) -> Callable[[], None]:
            def step() -> None:
                self.step(own)
                own.zero_grad()

            return step

        return {name: of(own) for name, own in layers.items()}


def check(case: Case, layers: dict[str, Layers]) -> None:
    expected, found = (case.results(layers[name]) for name in SAME_BITS)
    different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not a.equal(b)]
    if different or not all(value.any() for value in found):
        raise RuntimeError(
            f"{' and '.join(SAME_BITS)} must have the same bits, not zero; results {different} of "
            f"{len(found)} differ"
        )


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
    for name in arguments.models:
        for num_tokens in arguments.tokens:
            paths = result_of(models[name], num_tokens, device, arguments)
            size = {"tokens_per_rank": num_tokens, "layers": arguments.layers}
            report["results"].append(
                {"model": name, **asdict(models[name]), **size, "paths": paths}
            )
            if dist.get_rank() == 0:
                print(lines(report["results"][-1]), flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def result_of(
    model: Model, num_tokens: int, device: torch.device, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    layers = {
        name: Layers(model, arguments.layers, device, **options) for name, options in PATHS.items()
    }
    case = Case(model, num_tokens, device)
    check(case, layers)
    steps = case.steps(layers)
    results: dict[str, dict[str, float]] = {name: {} for name in layers}
    if device.type == "cuda":
        for name, step in steps.items():
            results[name]["peak_gib"] = peak_gib(step)
    gathers = {name: own.gather for name, own in layers.items()}
    for key, calls in (("ms", steps), ("gather_ms", gathers)):
        for name, times in timed_steps(calls, arguments, device).items():
            results[name] |= in_ms(times, key)
    return results


def lines(result: dict[str, Any]) -> str:
    """A result for people."""
    slowest = result["paths"]["bf16"]["ms"]
    rows = [
        f"{result['model']}, {result['layers']} layers, {result['tokens_per_rank']} tokens/rank"
    ]
    for name, found in result["paths"].items():
        words = [f"  {name:10} {found['ms']:9.3f} ms ({slowest / found['ms']:.2f}x)"]
        words.append(f"gathers {found['gather_ms']:9.3f} ms")
        if "peak_gib" in found:
            words.append(f"{found['peak_gib']:7.2f} GiB")
        rows.append("  ".join(words))
    return "\n".join(rows)


if __name__ == "__main__":
    main()
