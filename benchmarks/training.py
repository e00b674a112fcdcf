"""Forward and backward of deep_moe.moe beside a plain layer, and beside its products alone.

    python -m benchmarks.training --json training.json
    python -m benchmarks.training --models fine-grained --tokens 8192

One GPU. In each round all paths take their turn, so that a clock that changes meets them alike; the
medians of the rounds are reported. Paths:

    ours        deep_moe.moe, W1 and W3 in one tensor
    separate    deep_moe.moe, W1 and W3 apart
    recompute   ours with recompute=True
    mxfp8       ours with precision="mxfp8"
    fp8         ours with precision="fp8"
    plain       sorted by PyTorch, grouped_mm, torch.compile around it, PyTorch's autograd
    products    the six grouped products alone, on rows that are there
    quack       quack-kernels' grouped GEMMs with gathers and activation in them (quack_layer.py),
                with the tiles that they have without a search
    quack-tuned the same with the tiles that it finds fastest

The last two are timed where they are asked for, and need `pip install quack-kernels`.

Each path is timed as Python calls it (`ms`) and as a CUDA graph of the same step is replayed
(`graph_ms`): what the two differ by is time in which the GPU waits for the host, of which small
layers have much. Before anything is timed, ours and the library's results are compared with the
plain layer's. `tflops` counts the products of routed slots, without padding, and the time called
from Python.
`peak_gib` is what a path allocates beyond its inputs, parameters and gradients included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import deep_moe
from benchmarks.quack_layer import Products, QuackLayer, installed_products, interleaved, separated
from deep_moe.training.products import grouped_product, grouped_weight_gradient

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Sizes of a layer; num_experts are those of this GPU."""

    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int


MODELS = {
    "qwen3-235b": Model(4096, 1536, 128, 8),
    "deepseek-v3, 32 experts": Model(7168, 2048, 32, 8),
    "fine-grained": Model(1536, 256, 128, 8),
}
TOKENS = (8192, 16384, 32768)
PATHS = ("ours", "separate", "recompute", "mxfp8", "fp8", "plain", "products")
RESULTS = ("out", "x", "topk_weights", "w13", "w2")  # of a step: the output and gradients
LIBRARY_PATHS = {"quack": {"tuned": False}, "quack-tuned": {"tuned": True}}


@dataclass(frozen=True)
class Case:
    """Inputs. w13: W1 and W3 in one tensor."""

    model: Model
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    w13: torch.Tensor
    w1: torch.Tensor
    w3: torch.Tensor
    w2: torch.Tensor
    d_out: torch.Tensor

    @classmethod
    def random(
        cls,
        model: Model,
        num_tokens: int,
        device: str | torch.device = "cuda",
        *,
        seed: int = 0,
        num_ranks: int = 1,
    ) -> Case:
        """num_ranks: that have as many experts each, which tokens are routed to."""
        generator = torch.Generator(device).manual_seed(seed)
        hidden, intermediate, num_experts = model.hidden, model.intermediate, model.num_experts

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.empty(shape, device=device, dtype=torch.bfloat16)
            return values.normal_(0, scale, generator=generator)

        scores = torch.rand(num_tokens, num_ranks * num_experts, device=device, generator=generator)
        topk_weights, topk_idx = scores.softmax(-1).topk(model.num_topk)
        w13 = normal(num_experts, hidden, 2 * intermediate, scale=hidden**-0.5)
        return cls(
            model,
            normal(num_tokens, hidden).requires_grad_(),
            topk_idx,
            topk_weights.detach().requires_grad_(),
            w13.requires_grad_(),
            w13[..., :intermediate].detach().contiguous().requires_grad_(),
            w13[..., intermediate:].detach().contiguous().requires_grad_(),
            normal(num_experts, intermediate, hidden, scale=intermediate**-0.5).requires_grad_(),
            normal(num_tokens, hidden),
        )

    @property
    def num_slots(self) -> int:
        return self.topk_idx.numel()

    @property
    def flop(self) -> float:
        """Of the products of both passes: three times the forward pass's."""
        model = self.model
        return 3 * 2 * 3 * self.num_slots * model.hidden * model.intermediate

    def step(
        self, layer: Callable[..., torch.Tensor], *weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """Forward and backward: the output and all gradients."""
        leaves = [self.x, self.topk_weights, *weights]
        out = layer(self.x, self.topk_idx, self.topk_weights, *weights)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.d_out)]

    def our_step(self, **options: Any) -> list[torch.Tensor]:
        """Of deep_moe.moe, W1 and W3 in one tensor."""

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            x, topk_idx, topk_weights, w13, w2 = tensors
            return deep_moe.moe(x, topk_idx, topk_weights, w13, None, w2, **options)

        return self.step(layer, self.w13, self.w2)


def plain_layer(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """As one writes it in PyTorch, with its grouped GEMM and its autograd."""
    num_topk, num_experts = topk_idx.shape[1], w2.shape[0]
    experts = topk_idx.reshape(-1)
    order = experts.argsort(stable=True)
    offs = torch.searchsorted(
        experts[order], torch.arange(num_experts, device=x.device), right=True
    ).int()
    y = plain_experts(x[order // num_topk], w13, w2, offs)
    return weighted_sums(y, order, topk_weights)


def plain_experts(
    rows: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """rows: sorted by expert, of which each ends at its `offs`."""
    gate, up = _grouped_mm(rows, w13, offs).chunk(2, dim=-1)
    return _grouped_mm(F.silu(gate) * up, w2, offs)


def weighted_sums(y: torch.Tensor, order: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Of each token's slots. order: which slot each row of `y` is of."""
    weighted = y * topk_weights.reshape(-1)[order].unsqueeze(1).to(y.dtype)
    slots = torch.empty_like(weighted).index_copy(0, order, weighted)
    return slots.view(*topk_weights.shape, -1).sum(1)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return (getattr(F, "grouped_mm", None) or torch._grouped_mm)(a, b, offs=offs)


def products_alone(case: Case) -> Callable[[], Any]:
    """The six, on rows that are sorted and padded already."""
    from deep_moe.training.steps_for import steps_for

    steps = steps_for(case.x, None)
    w13, w2 = case.w13.detach(), case.w2.detach()
    rows = steps.route(case.topk_idx, case.model.num_experts)
    gathered = steps.gather(case.x.detach(), rows)
    d_rows = steps.gather(case.d_out, rows)
    linear1 = grouped_product(gathered, w13, rows.offs)
    gate, up = linear1.chunk(2, dim=1)
    activated = F.silu(gate) * up
    offs = rows.offs

    def run() -> None:
        grouped_product(gathered, w13, offs)
        grouped_product(activated, w2, offs)
        grouped_product(d_rows, w2.transpose(1, 2), offs)
        grouped_weight_gradient(activated, d_rows, offs)
        grouped_weight_gradient(gathered, linear1, offs)
        grouped_product(linear1, w13.transpose(1, 2), offs)

    return run


def paths_of(case: Case) -> dict[str, Callable[[], Any]]:
    compiled = torch.compile(plain_layer)
    return {
        "ours": case.our_step,
        "separate": lambda: case.step(deep_moe.moe, case.w1, case.w3, case.w2),
        "recompute": partial(case.our_step, recompute=True),
        "mxfp8": partial(case.our_step, precision="mxfp8"),
        "fp8": partial(case.our_step, precision="fp8"),
        "plain": lambda: case.step(compiled, case.w13, case.w2),
        "products": products_alone(case),
    }


def library_paths(case: Case, products: Products) -> dict[str, Callable[[], Any]]:
    w13 = interleaved(case.w13.detach()).requires_grad_()

    def path(layer: QuackLayer) -> Callable[[], Any]:
        return lambda: case.step(layer, w13, case.w2)

    return {name: path(QuackLayer(products, **options)) for name, options in LIBRARY_PATHS.items()}


def check(case: Case, paths: dict[str, Callable[[], Any]]) -> None:
    """Ours and the library's against the plain layer, as norms: BF16 rounds all a few times."""
    plain = paths["plain"]()
    for path in ("ours", *LIBRARY_PATHS):
        if path not in paths:
            continue
        found = paths[path]()
        if path in LIBRARY_PATHS:
            found[3] = separated(found[3])
        require_close(path, found, plain)


def require_close(path: str, found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    """Of two steps' results; RuntimeError for one that is not the plain layer's."""
    for name, a, b in zip(RESULTS, found, plain, strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        if not error < 0.02:
            raise RuntimeError(f"{path}: {name} differs from the plain layer's by {error:.3f}")


def milliseconds(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def captured(paths: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Replays of paths that have been called before, in the same memory."""
    pool = torch.cuda.graph_pool_handle()
    replays = {}
    for name, call in paths.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            call()
        replays[name] = graph.replay
    return replays


def measure(case: Case, num_rounds: int, wanted: Sequence[str]) -> dict[str, dict[str, float]]:
    """By path: milliseconds (median) called and replayed, tflops, peak_gib."""
    paths = paths_of(case)
    library = [name for name in wanted if name in LIBRARY_PATHS]
    if library:
        made = library_paths(case, installed_products())
        paths |= {name: made[name] for name in library}
    check(case, paths)
    paths = {name: paths[name] for name in wanted}
    results: dict[str, dict[str, float]] = {}
    for name, call in paths.items():
        call()  # compiles, and fills caches
        results[name] = {"peak_gib": peak_gib(call)}
    medians = times(paths, num_rounds)
    replayed = times(captured(paths), num_rounds)
    for name, ms in medians.items():
        results[name] |= {
            "ms": round(ms, 4),
            "graph_ms": round(replayed[name], 4),
            "tflops": round(case.flop / ms / 1e9, 1),
        }
    return results


def peak_gib(call: Callable[[], Any]) -> float:
    """What it allocates beyond what is there."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return round((torch.cuda.max_memory_allocated() - held) / GIB, 3)


def times(paths: dict[str, Callable[[], Any]], num_rounds: int) -> dict[str, float]:
    """Median of the milliseconds of each path, which take turns."""
    rounds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(num_rounds):
        for name, call in paths.items():
            rounds[name].append(milliseconds(call))
    return {name: statistics.median(values) for name, values in rounds.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--paths", nargs="+", choices=[*PATHS, *LIBRARY_PATHS], default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.training needs a GPU", file=sys.stderr)
        return 1
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "results": [],
    }
    for name in options.models:
        for num_tokens in options.tokens:
            model = MODELS[name]
            torch._dynamo.reset()
            results = measure(Case.random(model, num_tokens), options.rounds, options.paths)
            entry = {"model": name, **asdict(model), "tokens": num_tokens, "paths": results}
            report["results"].append(entry)
            for path, result in results.items():
                print(
                    f"{name:24} {num_tokens:6} {path:11} {result['ms']:9.3f} ms "
                    f"{result['graph_ms']:9.3f} ms in a graph "
                    f"{result['tflops']:7.1f} TFLOPS  {result['peak_gib']:7.2f} GiB",
                    flush=True,
                )
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
