"""Forward and backward of deep_moe.moe beside a plain layer, and beside its products alone.

    python -m benchmarks.training --json training.json
    python -m benchmarks.training --models fine-grained --tokens 8192
    python -m benchmarks.training --models qwen3-235b --tokens 8192 --accumulate 4

One GPU. In each round all paths take their turn, so that a clock that changes meets them alike; the
medians of the rounds are reported. Paths:

    ours        deep_moe.moe, W1 and W3 in one tensor
    separate    deep_moe.moe, W1 and W3 apart
    recompute   ours with recompute=True
    mxfp8       ours with precision="mxfp8"
    fp8         ours with precision="fp8"
    fp8-dgrad   ours with precision="fp8_dgrad"
    fp8-wgrad   ours with precision="fp8_wgrad"
    frozen      fp8 within frozen_weights, as passes behind the first one of an optimizer's step
    frozen-dgrad, frozen-wgrad  the same of fp8-dgrad, fp8-wgrad
    plain       sorted by PyTorch, grouped_mm, torch.compile around it, PyTorch's autograd
    products    the six grouped products alone, on rows that are there
    quack       quack-kernels' grouped GEMMs with gathers and activation in them (quack_layer.py),
                with the tiles that they have without a search
    quack-tuned the same with the tiles that it finds fastest
    liger       liger-cute-kernels' layer, one kernel for each pass (liger_layer.py)

The last three are timed where they are asked for, and need `pip install quack-kernels` or
`pip install liger-cute-kernels[cu12]`. Those of FP8 are left out where a GPU has no products for
them, unless they are asked for.

Each path is timed as Python calls it (`ms`) and as CUDA graphs of the same step are replayed
(`graph_ms`): what the two differ by is time in which the GPU waits for the host, of which small
layers have much. Both are the sum of their passes, `forward_ms` and `backward_ms`,
`graph_forward_ms` and `graph_backward_ms`. A graph keeps no quantized weights, so frozen paths are
not replayed. Before anything is timed, ours and the libraries'
results are compared with the plain layer's (`error`, a norm). `tflops` counts the products of
routed slots, without padding, and the time called from Python.
`peak_gib` is what a path allocates beyond its inputs, parameters and gradients included, without
liger's symmetric memory.

With `--accumulate N` a step has N forward and backward passes, called from Python, and PyTorch adds
up their weights' gradients in `.grad`. Two paths more, `fused-wgrad` and `frozen-fused-wgrad`, are
fp8-wgrad and frozen-wgrad with fuse_wgrad_accumulation=True. With `--main-grad` all paths add up in
float32 `main_grad`, which a step sets to zero first. Frozen paths enter and leave `frozen_weights`
in each step: `end_ms` is how long its end takes, and `passes_ms` is the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import deep_moe
from benchmarks import liger_layer
from benchmarks.liger_layer import LigerLayer
from benchmarks.quack_layer import Products, QuackLayer, installed_products, interleaved, separated
from benchmarks.tables import markdown_table
from deep_moe.targets import target_of_capability
from deep_moe.training.products import grouped_product, grouped_weight_gradient
from deep_moe.trial.timing import machine

GIB = 2**30
LABELS = {  # of paths, in tables
    "ours": "BF16",
    "fp8": '`"fp8"`',
    "fp8-dgrad": '`"fp8_dgrad"`',
    "fp8-wgrad": '`"fp8_wgrad"`',
    "frozen": '`"fp8"`, frozen',
    "frozen-dgrad": '`"fp8_dgrad"`, frozen',
    "frozen-wgrad": '`"fp8_wgrad"`, frozen',
    "fused-wgrad": '`"fp8_wgrad"`, fused sums',
    "frozen-fused-wgrad": '`"fp8_wgrad"`, frozen, fused sums',
    "plain": "plain layer",
}


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
    # Of which liger-cute-kernels publishes times.
    "qwen3-30b": Model(2048, 768, 128, 8),
    "4096 x 2048": Model(4096, 2048, 4, 2),
    "5120 x 8192": Model(5120, 8192, 4, 2),
}
DEFAULT_MODELS = ("qwen3-235b", "deepseek-v3, 32 experts", "fine-grained")
TOKENS = (8192, 16384, 32768)
FP8_LAYERS = {"fp8": "fp8", "fp8-dgrad": "fp8_dgrad", "fp8-wgrad": "fp8_wgrad"}
FROZEN_PATHS = {"frozen": "fp8", "frozen-dgrad": "fp8_dgrad", "frozen-wgrad": "fp8_wgrad"}
FP8_PATHS = (*FP8_LAYERS, *FROZEN_PATHS)
PATHS = ("ours", "separate", "recompute", "mxfp8", *FP8_PATHS, "plain", "products")
RESULTS = ("out", "x", "topk_weights", "w13", "w2")  # of a step: the output and gradients
FUSED_PATHS = ("fused-wgrad", "frozen-fused-wgrad")  # in steps of several passes alone
ACCUMULATING: dict[str, dict[str, Any]] = {  # paths of these and their options
    "ours": {},
    **{name: {"precision": value} for name, value in (FP8_LAYERS | FROZEN_PATHS).items()},
    **{name: {"precision": "fp8_wgrad", "fuse_wgrad_accumulation": True} for name in FUSED_PATHS},
}
QUACK_PATHS = {"quack": {"tuned": False}, "quack-tuned": {"tuned": True}}
LIBRARY_PATHS = (*QUACK_PATHS, "liger")
# As norms, how far from the plain layer's: BF16 rounds all a few times. Liger's kernels add up
# weights' gradients in memory.
ALLOWED_ERROR, LIGER_ALLOWED_ERROR = 0.02, 0.05


@dataclass(frozen=True)
class Step:
    """A path's forward pass, and its backward pass on what that returned. `Case.step` returns the
    output and all gradients."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.backward(self.forward())


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

    def step(self, layer: Callable[..., torch.Tensor], *weights: torch.Tensor) -> Step:
        """Forward and backward: the output and all gradients."""
        leaves = [self.x, self.topk_weights, *weights]

        def forward() -> torch.Tensor:
            return layer(self.x, self.topk_idx, self.topk_weights, *weights)

        def backward(out: torch.Tensor) -> list[torch.Tensor]:
            return [out.detach(), *torch.autograd.grad(out, leaves, self.d_out)]

        return Step(forward, backward)

    def our_step(self, **options: Any) -> Step:
        """Of deep_moe.moe, W1 and W3 in one tensor."""

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            x, topk_idx, topk_weights, w13, w2 = tensors
            return deep_moe.moe(x, topk_idx, topk_weights, w13, None, w2, **options)

        return self.step(layer, self.w13, self.w2)

    def accumulating_step(self, path: str, num_passes: int, *, has_main_grad: bool = False) -> Step:
        """Passes between two steps of an optimizer, as `forward`, and as `backward` the end of
        `frozen_weights`, where the path is frozen. has_main_grad: sums are float32."""
        weights = (self.w13, self.w2)
        options = ACCUMULATING[path]

        def passes() -> ExitStack:
            stack = ExitStack()
            if path.startswith("frozen"):
                stack.enter_context(deep_moe.frozen_weights(*weights))
            for weight in weights:
                weight.grad = None
                if has_main_grad:
                    weight.main_grad = torch.zeros_like(  # type: ignore[attr-defined]
                        weight, dtype=torch.float32
                    )
            for _ in range(num_passes):
                x, topk_weights = (
                    tensor.detach().requires_grad_() for tensor in (self.x, self.topk_weights)
                )
                given = (x, self.topk_idx, topk_weights, self.w13, None, self.w2)
                out = deep_moe.moe(*given, **options)
                out.backward(self.d_out)
                for weight in weights:
                    if has_main_grad and weight.grad is not None:
                        weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]
                        weight.grad = None
            return stack

        return Step(passes, lambda stack: stack.close())


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


def products_alone(case: Case) -> Step:
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

    def forward() -> None:
        grouped_product(gathered, w13, offs)
        grouped_product(activated, w2, offs)

    def backward(_: None) -> None:
        grouped_product(d_rows, w2.transpose(1, 2), offs)
        grouped_weight_gradient(activated, d_rows, offs)
        grouped_weight_gradient(gathered, linear1, offs)
        grouped_product(linear1, w13.transpose(1, 2), offs)

    return Step(forward, backward)


def paths_of(case: Case) -> dict[str, Step]:
    return {
        "ours": case.our_step(),
        "separate": case.step(deep_moe.moe, case.w1, case.w3, case.w2),
        "recompute": case.our_step(recompute=True),
        "mxfp8": case.our_step(precision="mxfp8"),
        **{name: case.our_step(precision=precision) for name, precision in FP8_LAYERS.items()},
        "plain": case.step(torch.compile(plain_layer), case.w13, case.w2),
        "products": products_alone(case),
    }


def default_paths(capability: tuple[int, int]) -> tuple[str, ...]:
    """Those that a GPU of this compute capability has products for."""
    target = target_of_capability(capability)
    has_fp8 = target is not None and target.has_grouped_product
    return tuple(name for name in PATHS if name not in FP8_PATHS or has_fp8)


def frozen_paths(case: Case, names: Sequence[str], stack: ExitStack) -> dict[str, Step]:
    """Of weights of their own, which are frozen as long as the stack is open."""
    own = replace(
        case,
        w13=case.w13.detach().clone().requires_grad_(),
        w2=case.w2.detach().clone().requires_grad_(),
    )
    stack.enter_context(deep_moe.frozen_weights(own.w13, own.w2))
    return {name: own.our_step(precision=FROZEN_PATHS[name]) for name in names}


def quack_paths(case: Case, products: Products) -> dict[str, Step]:
    w13 = interleaved(case.w13.detach()).requires_grad_()
    return {
        name: case.step(QuackLayer(products, **options), w13, case.w2)
        for name, options in QUACK_PATHS.items()
    }


def liger_path(case: Case, calls: liger_layer.Calls, num_ranks: int = 1) -> Step:
    """With indices, routing weights and weights as its kernels take them."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().requires_grad_()

    own = replace(
        case, topk_idx=case.topk_idx.int(), topk_weights=leaf(case.topk_weights.bfloat16())
    )
    weights = [leaf(weight.transpose(1, 2)) for weight in (case.w1, case.w3, case.w2)]
    return own.step(LigerLayer(calls, num_ranks * case.model.num_experts), *weights)


def as_plain(path: str, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """A path's results in the form of the plain layer's."""
    if path in QUACK_PATHS:
        out, x, topk_weights, w13, w2 = found
        return [out, x, topk_weights, separated(w13), w2]
    if path == "liger":
        out, x, topk_weights, gate, up, down = found
        return [out, x, topk_weights, torch.cat([gate, up], 1).mT, down.mT]
    return found


def check(case: Case, paths: dict[str, Step]) -> dict[str, float]:
    """Errors of ours and the libraries' results beside the plain layer's, the largest of each."""
    plain = paths["plain"]()
    checked = [path for path in ("ours", *LIBRARY_PATHS) if path in paths]
    return {path: require_close(path, as_plain(path, paths[path]()), plain) for path in checked}


def require_close(path: str, found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> float:
    """The largest error of two steps' results; RuntimeError for one that is not the plain
    layer's."""
    allowed = LIGER_ALLOWED_ERROR if path == "liger" else ALLOWED_ERROR
    errors = []
    for name, a, b in zip(RESULTS, found, plain, strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        if not error < allowed:
            raise RuntimeError(f"{path}: {name} differs from the plain layer's by {error:.3f}")
        errors.append(error)
    return max(errors)


def milliseconds(step: Step) -> tuple[float, float]:
    """Of the forward pass, and of the backward pass."""
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    state = step.forward()
    middle.record()
    step.backward(state)
    end.record()
    end.synchronize()
    return begin.elapsed_time(middle), middle.elapsed_time(end)


def captured(paths: dict[str, Step]) -> dict[str, Step]:
    """Replays of paths that have been called before, in the same memory, a graph for each pass."""
    pool = torch.cuda.graph_pool_handle()
    return {name: _captured(step, pool) for name, step in paths.items()}


def _captured(step: Step, pool: Any) -> Step:
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward, pool=pool):
        state = step.forward()
    with torch.cuda.graph(backward, pool=pool):
        step.backward(state)
    return Step(forward.replay, lambda _: backward.replay())


def measure(case: Case, num_rounds: int, wanted: Sequence[str]) -> dict[str, dict[str, float]]:
    """By path: milliseconds (medians) called and replayed, tflops, peak_gib."""
    paths = paths_of(case)
    with ExitStack() as stack:
        frozen = [name for name in wanted if name in FROZEN_PATHS]
        if frozen:
            paths |= frozen_paths(case, frozen, stack)
        quack = [name for name in wanted if name in QUACK_PATHS]
        if quack:
            made = quack_paths(case, installed_products())
            paths |= {name: made[name] for name in quack}
        if "liger" in wanted:
            model = case.model
            calls = liger_layer.configured(
                case.x.device,
                num_tokens=case.x.shape[0],
                hidden=model.hidden,
                num_experts=model.num_experts,
                num_topk=model.num_topk,
            )
            paths["liger"] = liger_path(case, stack.enter_context(calls))
        errors = check(case, paths)
        return _measured(case, {name: paths[name] for name in wanted}, num_rounds, errors)


def _measured(
    case: Case, paths: dict[str, Step], num_rounds: int, errors: dict[str, float]
) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for name, call in paths.items():
        call()  # compiles, and fills caches
        results[name] = {"peak_gib": peak_gib(call)}
        if name in errors:
            results[name]["error"] = round(errors[name], 5)
    called = times(paths, num_rounds)
    in_graphs = {name: step for name, step in paths.items() if name not in FROZEN_PATHS}
    replayed = times(captured(in_graphs), num_rounds)
    for name, result in results.items():
        for prefix, found in (("", called[name]), ("graph_", replayed.get(name, {}))):
            result |= {prefix + key: round(value, 4) for key, value in found.items()}
        result["tflops"] = round(case.flop / result["ms"] / 1e9, 1)
    return results


def measure_accumulating(
    case: Case,
    num_rounds: int,
    wanted: Sequence[str],
    num_passes: int,
    *,
    has_main_grad: bool = False,
) -> dict[str, dict[str, float]]:
    """By path, of steps of so many passes: milliseconds (medians), tflops, peak_gib."""
    steps = {
        name: case.accumulating_step(name, num_passes, has_main_grad=has_main_grad)
        for name in wanted
    }
    results: dict[str, dict[str, float]] = {}
    for name, step in steps.items():
        step()  # compiles, and fills caches
        for weight in (case.w13, case.w2):
            weight.grad = weight.main_grad = None  # type: ignore[attr-defined]
        results[name] = {"peak_gib": peak_gib(step)}
    for name, found in times(steps, num_rounds).items():
        results[name] |= {
            "ms": round(found["ms"], 4),
            "passes_ms": round(found["forward_ms"], 4),
            "end_ms": round(found["backward_ms"], 4),
            "tflops": round(num_passes * case.flop / found["ms"] / 1e9, 1),
        }
    return results


def peak_gib(call: Callable[[], Any]) -> float:
    """What it allocates beyond what is there."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return round((torch.cuda.max_memory_allocated() - held) / GIB, 3)


def times(paths: dict[str, Step], num_rounds: int) -> dict[str, dict[str, float]]:
    """Medians of the milliseconds of each path, which take turns: `ms`, and of its passes."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    for _ in range(num_rounds):
        for name, step in paths.items():
            rounds[name].append(milliseconds(step))
    return {
        name: {
            "ms": statistics.median(forward + backward for forward, backward in values),
            "forward_ms": statistics.median(forward for forward, _ in values),
            "backward_ms": statistics.median(backward for _, backward in values),
        }
        for name, values in rounds.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(DEFAULT_MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument(
        "--paths",
        nargs="+",
        choices=[*PATHS, *FUSED_PATHS, *LIBRARY_PATHS],
        help="default: all but the libraries', and fp8's where the GPU has products for them",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="time steps of N passes, of ours and the paths of FP8, in place of single passes",
    )
    parser.add_argument(
        "--main-grad",
        action="store_true",
        help="with --accumulate: gradients are added up in float32",
    )
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args(arguments)
    if options.accumulate is not None:
        if options.accumulate < 1:
            parser.error(f"--accumulate must be at least 1; got {options.accumulate}")
        if refused := set(options.paths or ()) - set(ACCUMULATING):
            parser.error(f"--accumulate has no paths {', '.join(sorted(refused))}")
    elif refused := set(options.paths or ()) & set(FUSED_PATHS):
        parser.error(f"paths {', '.join(sorted(refused))} go with --accumulate")
    elif options.main_grad:
        parser.error("--main-grad goes with --accumulate")
    if not torch.cuda.is_available():
        print("benchmarks.training needs a GPU", file=sys.stderr)
        return 1
    report: dict[str, Any] = {
        "machine": machine(torch.device("cuda", torch.cuda.current_device()), options.commit),
        "rounds": options.rounds,
        "results": [],
    }
    paths = options.paths or default_paths(torch.cuda.get_device_capability())
    if options.accumulate is not None:
        paths = [path for path in paths if path in ACCUMULATING]
        if options.paths is None and "fp8-wgrad" in paths:
            paths += FUSED_PATHS
    with ExitStack() as stack:
        if "liger" in paths:
            device = torch.device("cuda", torch.cuda.current_device())
            stack.enter_context(liger_layer.runtime(device))
        for name in options.models:
            for num_tokens in options.tokens:
                entry = entry_of(
                    name,
                    num_tokens,
                    options.rounds,
                    paths,
                    options.accumulate,
                    has_main_grad=options.main_grad,
                )
                report["results"].append(entry)
                print(lines(entry), flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def entry_of(
    name: str,
    num_tokens: int,
    num_rounds: int,
    paths: Sequence[str],
    num_passes: int | None = None,
    *,
    has_main_grad: bool = False,
) -> dict[str, Any]:
    """A model's results at one number of tokens, of steps of so many passes, or of single ones."""
    model = MODELS[name]
    torch._dynamo.reset()
    device = torch.device("cuda", torch.cuda.current_device())
    case = Case.random(model, num_tokens, device)
    if num_passes is None:
        sizes, results = {"tokens": num_tokens}, measure(case, num_rounds, paths)
    else:
        sizes = {"tokens": num_tokens, "accumulate": num_passes}
        if has_main_grad:
            sizes["main_grad"] = True
        results = measure_accumulating(
            case, num_rounds, paths, num_passes, has_main_grad=has_main_grad
        )
    del case
    torch.cuda.empty_cache()
    return {"model": name, **asdict(model), **sizes, "paths": results}


def lines(entry: dict[str, Any]) -> str:
    """An entry for people."""
    return "\n".join(
        f"{entry['model']:24} {entry['tokens']:6} {path:12} {_milliseconds(found, '')} "
        f"{_milliseconds(found, 'graph_'):>43} in graphs "
        f"{found['tflops']:7.1f} TFLOPS  {found['peak_gib']:7.2f} GiB"
        for path, found in entry["paths"].items()
    )


def _milliseconds(found: dict[str, float], prefix: str) -> str:
    if prefix + "ms" not in found:
        return "-"
    parts = ("passes_", "end_") if "end_ms" in found else ("forward_", "backward_")
    whole, *passes = (found[f"{prefix}{name}ms"] for name in ("", *parts))
    return f"{whole:9.3f} ms ({passes[0]:.3f} + {passes[1]:.3f})"


TIMES = {
    "graph_ms": "a step in graphs",
    "graph_forward_ms": "a forward pass in graphs",
    "ms": "a step, called from Python",
    "forward_ms": "a forward pass, called from Python",
}


def table(results: Sequence[Mapping[str, Any]], time: str) -> str:
    """In Markdown: one of TIMES of each path, ms, and how many times as fast as BF16 it is."""
    paths = list(dict.fromkeys(["ours", *(path for entry in results for path in entry["paths"])]))
    rows = []
    for entry in results:
        found = {path: times[time] for path, times in entry["paths"].items() if time in times}
        cells = [
            f"{found[path]:.2f} ({found['ours'] / found[path]:.2f})" if path in found else ""
            for path in paths[1:]
        ]
        rows.append([entry["model"], str(entry["tokens"]), f"{found['ours']:.2f}", *cells])
    columns = ["sizes", "tokens", *(LABELS.get(path, path) for path in paths)]
    return markdown_table(columns, rows, words=1)


if __name__ == "__main__":
    sys.exit(main())
