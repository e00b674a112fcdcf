"""Times a layer of experts in four bits or MXFP8 as engines run it on Hopper, beside ours.

    python -m benchmarks.engines --ranks 1 --json engines-1.json
    python -m benchmarks.engines --ranks 1 --weights nvfp4 --json engines-nvfp4.json
    python -m benchmarks.engines --ranks 2 --json engines-2.json
    python -m benchmarks.engines --show engines-1.json engines-2.json --markdown engines.md

One rank holds all experts of a layer: no expert parallelism. With more, each holds its part and has
tokens of its own. A path begins with BF16 tokens and with what the router chose, and ends with the
tokens' sums. Ours is `prepare_inputs` and the fused call: MXFP4 weights beside tokens in E4M3 and,
on Hopper, once more beside BF16, other weights beside the tokens that go with them. An engine's is
vLLM's modular kernel around one of its kernels (vllm_layer.py), its all-gather and reduce-scatter
included. With --transports all_to_all our dispatch and combine for many tokens take their place;
with two_batches, too, around halves of the tokens that overlap as by vLLM's --enable-dbo. vLLM must
be importable, a folder on PYTHONPATH is enough; without it, and of kernels that need a package
which is not there, or another GPU, the report says why they are absent. Nothing is fetched.
README.md says what to put there.

For every number of tokens each path is called first, and some of its tokens are compared: ours with
the reference and its intervals, all with the sums in FP64 of unrounded BF16 tokens and the weights'
numbers; `distance` is the angle to them. If ours is wrong, the run ends with an error; an engine's
path that is wrong, or fails, is not timed with so many tokens, and the report says why. Then each
path is captured in a CUDA graph of --pairs calls, as engines run small steps; the graphs are
replayed in turn, and a time is the median of --calls replays, of the slowest rank, for one call.
What the last replay wrote is compared again.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from deep_moe.activations import Activation, Swiglu
from deep_moe.cli.layer_options import LayerOptions
from deep_moe.cli.output import new_table, stdout
from deep_moe.fused.input_preparation import prepare_inputs
from deep_moe.fused.mega_moe import mega_moe
from deep_moe.heuristics import PRESETS, MoEShape
from deep_moe.integrations.token_format import served_token_format
from deep_moe.targets import target_of_device
from deep_moe.trial.real_size import ROUTINGS, expert_layer, rank_tokens
from deep_moe.trial.synthetic import Layer, Tokens, quantize_tokens
from deep_moe.trial.timing import TimedLayer, machine
from deep_moe.weights import DEFAULT_WEIGHTS, WEIGHTS, weight_format
from deep_moe.weights.layers import one_expert

from .all_to_all import over_ranks, run_timed
from .mega_moe import MODELS, SIZES, TOKENS, model_name, run_on_gpus
from .problem import checked_sample, rank_weights
from .tables import markdown_table
from .vllm_layer import (
    BACKENDS,
    CHECKPOINTS,
    Backend,
    VllmLayer,
    VllmLayerOverAllToAll,
    vllm_config,
    vllm_groups,
)

OURS = "deep_moe"
# How tokens come to an engine's kernel: "vllm" is its own all-gather and reduce-scatter.
TRANSPORTS = {
    "vllm": "vLLM's collectives",
    "all_to_all": "our all-to-all",
    "two_batches": "our all-to-all, two batches",
}
# Of the angle to the unrounded layer's result, by how a path multiplies tokens. Rounding an
# operand or a sum to BF16 makes for some 1e-6, tokens in E4M3 for 1e-3.
ALLOWED = {"bf16": 1e-4, "fp8": 5e-3}


def main() -> None:
    arguments = parse_arguments()
    if arguments.show:
        show([json.loads(path.read_text()) for path in arguments.show], arguments.markdown)
        return
    run_on_gpus(run_rank, arguments.ranks, arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=sorted(PRESETS), default=list(MODELS))
    parser.add_argument(
        "--weights",
        choices=[name for name in CHECKPOINTS if name in WEIGHTS],
        default=DEFAULT_WEIGHTS,
    )
    for option, field in SIZES.items():
        parser.add_argument(f"--{option}", type=int, help=f"{field}, instead of the model's")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="per rank")
    parser.add_argument("--engines", nargs="*", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument(
        "--transports", nargs="+", choices=TRANSPORTS, default=["vllm"], help="of engines' kernels"
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--calls", type=int, default=20, help="replays of each path, at least")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=3, help="replays before those of a round")
    parser.add_argument("--pairs", type=int, default=10, help="calls in a CUDA graph")
    parser.add_argument("--clamp", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checked-tokens", type=int, default=8, help="compared, on each rank")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="JSON", help="print reports' tables; time nothing"
    )
    parser.add_argument("--markdown", type=Path, help="with --show: write the tables there, too")
    arguments = parser.parse_args(words)
    if min(arguments.calls, arguments.rounds, arguments.pairs, *arguments.tokens) < 1:
        parser.error("--tokens, --calls, --rounds and --pairs must be at least 1")
    if arguments.markdown and not arguments.show:
        parser.error("--markdown needs --show")
    # Of `model_name`, for all results alike.
    arguments.token_format = None
    arguments.pool_tokens, arguments.shared_experts = None, 0
    return arguments


class ExpertPath(Protocol):
    """One way to run the layer. tokens: how it multiplies them. A call: bfloat16 [tokens, hidden]
    to the same; topk_idx is int32, topk_weights float32."""

    label: str
    tokens: str

    def step(self, tokens_of_ranks: list[int]) -> AbstractContextManager[None]:
        """Calls are made inside."""

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor: ...


class OwnPath:
    """The fused layer, from BF16 tokens, which it multiplies in what the format of `shape` says.
    layer: weights as checkpoints have them."""

    label = "deep_moe"

    def __init__(self, shape: MoEShape, layer: Layer, clamp: float, device: torch.device) -> None:
        self.tokens = "fp8" if shape.tokens.has_scales else "bf16"
        self.activation = Swiglu(clamp)
        self.layer = TimedLayer(shape, layer, device)

    def check(
        self, x: torch.Tensor, routed: Tokens, y: torch.Tensor, arguments: argparse.Namespace
    ) -> None:
        """Some rows of y beside the reference. RuntimeError if they differ."""
        shape = self.layer.shape
        quantized = quantize_tokens(x.float(), shape.tokens)
        tokens = Tokens(*quantized, routed.topk_idx, routed.topk_weights)
        checked_sample(shape, tokens, y, arguments.checked_tokens, arguments.seed, self.activation)

    def step(self, tokens_of_ranks: list[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        own = self.layer
        prepare_inputs(x, topk_idx, topk_weights, own.buffer)
        y = torch.empty_like(x)
        mega_moe(
            y,
            own.weights,
            own.buffer,
            activation=self.activation,
            expected_tokens_per_rank=x.shape[0],
        )
        return y

    def close(self) -> None:
        self.layer.buffer.raise_if_failed()
        self.layer.close()


class EnginePath(VllmLayer):
    def __init__(self, backend: Backend, *layer: Any) -> None:
        self.label = backend.label
        self.tokens = backend.tokens
        super().__init__(backend, *layer)


class OverAllToAll(VllmLayerOverAllToAll):
    """The kernel of an engine's path behind our dispatch."""

    def __init__(
        self, path: EnginePath, shape: MoEShape, device: torch.device, transport: str
    ) -> None:
        self.label = f"{path.label}, {TRANSPORTS[transport]}"
        self.tokens = path.tokens
        super().__init__(path, shape, device, in_two_batches=transport == "two_batches")


def run_rank(
    device: torch.device,
    arguments: argparse.Namespace,
    make_engines: Callable[..., dict[str, ExpertPath]] | None = None,
) -> None:
    """One process: all models, all sizes. make_engines: as `engine_paths`, for tests."""
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "vllm": vllm_version(),
        "num_ranks": dist.get_world_size(),
        "absent": {},
        "labels": {},
        "results": [],
    }
    for model in arguments.model:
        with ExitStack() as stack:
            for result in model_results(
                model, arguments, device, report, stack, make_engines or engine_paths
            ):
                report["results"].append(result)
                if dist.get_rank() == 0:
                    print(line(result), flush=True)
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        show([report], None)


def model_results(
    model: str,
    arguments: argparse.Namespace,
    device: torch.device,
    report: dict[str, Any],
    stack: ExitStack,
    make_engines: Callable[..., dict[str, ExpertPath]],
) -> Any:
    """A result for each number of tokens, the most first: what the largest step needs of memory is
    there before any graph is captured."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    options = LayerOptions(
        model=model,
        weights=arguments.weights,
        activation="swiglu",
        **{option: getattr(arguments, option) for option in SIZES},
    )
    shape = options.shape(num_ranks, max(arguments.tokens), arch=target_of_device(device).name)
    layer = rank_weights(shape, rank, arguments.seed, device)
    paths: dict[str, ExpertPath] = {}
    paths |= own_paths(shape, layer, arguments, device, stack)
    paths |= make_engines(shape, layer, arguments, device, report["absent"], stack)
    del layer
    report["labels"] |= {name: path.label for name, path in paths.items()}
    for num_tokens in sorted(arguments.tokens, reverse=True):
        x, tokens = model_tokens(shape, num_tokens, rank, arguments, device)
        expected = exact_sample(shape, x, tokens, arguments, device)
        result: dict[str, Any] = {
            "model": model_name(model, arguments),
            "layer": {field: getattr(shape, field) for field in SIZES.values()},
            "num_ranks": num_ranks,
            "experts_per_rank": shape.num_experts_per_rank,
            "tokens_per_rank": num_tokens,
            "routing": arguments.routing,
            "paths": {},
            "failed": {},
        }
        calls: dict[str, Call] = {}
        for name, path in paths.items():
            call = Call(path, x, tokens, num_ranks, arguments, expected)
            if isinstance(path, OwnPath):
                y = call()
                call.check(y)
                path.check(x, tokens, y, arguments)
            else:
                failure = first_failure(partial(call_and_check, call))
                if failure is not None:
                    result["failed"][name] = failure
                    continue
            calls[name] = call
        times = timed_in_turn(calls, arguments, device, result["failed"])
        for name, of_path in times.items():
            of_path["distance"] = calls[name].check(calls[name].y)
            of_path["times_slower"] = of_path["us"] / times[OURS]["us"]
            of_path["tokens"] = calls[name].path.tokens
        result["paths"] = times
        yield result


def call_and_check(call: Call) -> None:
    call.check(call())


def first_failure(work: Callable[[], Any]) -> str | None:
    """What the first rank said on which `work` failed; None if it ran on all. Whatever another
    project's kernel ends with, a compiler's failure or a lack of memory, leaves the other paths to
    be timed."""
    own = None
    try:
        work()
    except Exception as error:
        own = f"{type(error).__name__}: {error}".splitlines()[0]
        if not str(error):  # a bare assertion: where it stands says what it is about
            frame = traceback.extract_tb(error.__traceback__)[-1]
            own += f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, own)
    return next((failure for failure in failures if failure is not None), None)


def model_tokens(
    shape: MoEShape, num_tokens: int, rank: int, arguments: argparse.Namespace, device: torch.device
) -> tuple[torch.Tensor, Tokens]:
    """BF16 tokens, normally distributed, and the experts that they go to."""
    routed = rank_tokens(shape, num_tokens, rank, arguments.seed, device, arguments.routing)
    generator = torch.Generator(device).manual_seed(104_729 * arguments.seed + rank)
    x = torch.randn(num_tokens, shape.hidden, device=device, generator=generator).bfloat16()
    return x, routed


def sample_rows(num_tokens: int, arguments: argparse.Namespace) -> torch.Tensor:
    count = min(arguments.checked_tokens, num_tokens)
    return torch.linspace(0, num_tokens - 1, count).long()


def exact_sample(
    shape: MoEShape,
    x: torch.Tensor,
    tokens: Tokens,
    arguments: argparse.Namespace,
    device: torch.device,
) -> torch.Tensor:
    """float64 [sampled tokens, hidden]: nothing is rounded but what is given."""
    rows = sample_rows(x.shape[0], arguments).to(device)
    activation: Activation = Swiglu(arguments.clamp)
    block = target_of_device(device).weights_of(shape.weights, shape.token_format).scale_block
    dequantize = weight_format(shape.weights).dequantize
    y = torch.zeros(len(rows), shape.hidden, dtype=torch.float64, device=device)
    topk_idx, topk_weights = tokens.topk_idx[rows], tokens.topk_weights[rows]
    for expert in topk_idx.unique().tolist():
        if expert < 0:
            continue
        layer = expert_layer(shape, expert, arguments.seed, device, block)
        w1 = dequantize(one_expert(layer.l1, 0), activation.num_l1_matrices).double()
        w2 = dequantize(one_expert(layer.l2, 0)).double()
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        activated = activation.of_linear1(x[rows][token].double() @ w1.T)
        out = activated @ w2.T * topk_weights[token, slot].double().unsqueeze(1)
        y.index_add_(0, token, out)
    return y


class Call:
    """A path with the tokens of one size; `y` is what the last call gave."""

    def __init__(
        self,
        path: ExpertPath,
        x: torch.Tensor,
        tokens: Tokens,
        num_ranks: int,
        arguments: argparse.Namespace,
        expected: torch.Tensor,
    ) -> None:
        self.path = path
        self.x = x
        self.topk_idx = tokens.topk_idx.int()
        self.topk_weights = tokens.topk_weights
        self.tokens_of_ranks = [x.shape[0]] * num_ranks
        self.rows = sample_rows(x.shape[0], arguments).to(x.device)
        self.expected = expected
        self.y = torch.empty(0)

    def __call__(self) -> torch.Tensor:
        with self.path.step(self.tokens_of_ranks):
            self.y = self.path(self.x, self.topk_idx, self.topk_weights)
        return self.y

    def check(self, y: torch.Tensor) -> float:
        """The angle between some tokens of y and the exact ones, at the farthest. RuntimeError if
        that is too far."""
        pairs = zip(y[self.rows].double(), self.expected, strict=True)
        worst = max(angle(one, other) for one, other in pairs)
        if not worst <= ALLOWED[self.path.tokens]:
            raise RuntimeError(
                f"{self.path.label} is {worst:.2g} away from the exact result, as an angle, with "
                f"{self.x.shape[0]} tokens; at most {ALLOWED[self.path.tokens]} is right for "
                f"{self.path.tokens} tokens"
            )
        return worst


def angle(one: torch.Tensor, other: torch.Tensor) -> float:
    """1 minus the cosine.

    >>> angle(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    1.0
    """
    norms = one.norm() * other.norm()
    return float(1 - (one * other).sum() / norms) if norms > 0 else float(norms.isnan() or norms)


def own_paths(
    shape: MoEShape,
    layer: Layer,
    arguments: argparse.Namespace,
    device: torch.device,
    stack: ExitStack,
) -> dict[str, OwnPath]:
    """The fused layer with each kind of tokens; `OURS` is the one with the usual kind."""
    paths = {}
    usual = shape.token_format
    others = ["bf16"] if shape.weights == "mxfp4" else []
    for tokens in (usual, *others):
        name = OURS if tokens == usual else f"{OURS}_{tokens}"
        served = served_token_format(shape.weights, tokens, None, device)
        paths[name] = OwnPath(replace(shape, token_format=served), layer, arguments.clamp, device)
        stack.callback(paths[name].close)
    return paths


def engine_paths(
    shape: MoEShape,
    layer: Layer,
    arguments: argparse.Namespace,
    device: torch.device,
    absent: dict[str, str],
    stack: ExitStack,
) -> dict[str, ExpertPath]:
    """Those of vLLM's kernels that all ranks have. absent: takes the others' reasons."""
    if not arguments.engines:
        return {}
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    paths: dict[str, ExpertPath] = {}

    def add(name: str) -> None:
        path = EnginePath(BACKENDS[name], shape, layer, arguments.clamp, device)
        for transport in arguments.transports:
            if transport == "vllm":
                paths[name] = path
                continue
            over = paths[f"{name}_{transport}"] = OverAllToAll(path, shape, device, transport)
            stack.callback(over.close)

    try:
        config = vllm_config(rank, num_ranks, shape.num_max_tokens_per_rank)
    except ImportError as error:
        absent |= dict.fromkeys(arguments.engines, f"vllm cannot be imported: {error}")
        return {}
    local_rank = device.index or 0
    transport = "nccl" if device.type == "cuda" else "gloo"
    stack.enter_context(vllm_groups(config, rank, 1, local_rank, transport))
    for name in arguments.engines:
        made = set(paths)
        failure = first_failure(partial(add, name))
        if failure is not None:
            for added in set(paths) - made:
                del paths[added]
            absent[name] = failure.removeprefix("AbsentError: ")
    return paths


def vllm_version() -> str | None:
    try:
        import vllm
    except ImportError:
        return None
    return str(vllm.__version__)


def timed_in_turn(
    calls: Mapping[str, Call],
    arguments: argparse.Namespace,
    device: torch.device,
    failed: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """Microseconds of one call of each path. On a CPU there are no graphs. failed: takes what
    engines' paths cannot be captured for."""
    on_gpu = device.type == "cuda"
    num_calls = arguments.pairs if on_gpu else 1
    replays: dict[str, Callable[[], Any]] = dict(calls)
    if on_gpu:
        for name, call in calls.items():
            graph = torch.cuda.CUDAGraph()
            failure = first_failure(partial(capture, graph, call, num_calls, device))
            if failure is None:
                replays[name] = graph.replay
            elif isinstance(call.path, OwnPath):
                raise RuntimeError(f"{name} cannot be captured: {failure}")
            else:
                failed[name] = failure
                del replays[name]
    dist.barrier()
    own: dict[str, list[float]] = {name: [] for name in replays}
    calls_per_round = -(-arguments.calls // arguments.rounds)
    for _ in range(arguments.rounds):
        for name, replay in replays.items():
            ends = [run_timed(replay, device) for _ in range(arguments.warmup + calls_per_round)]
            if on_gpu:
                torch.cuda.synchronize(device)
            own[name] += [elapsed_us() / num_calls for elapsed_us in ends[arguments.warmup :]]
    return {name: over_ranks(times, device) for name, times in own.items()}


def capture(graph: torch.cuda.CUDAGraph, call: Call, num_calls: int, device: torch.device) -> None:
    """num_calls calls, behind two that compile and load what they need: the second may take another
    tile than the first."""
    for _ in range(2):
        call()
        torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(num_calls):
            call()


def line(result: Mapping[str, Any]) -> str:
    """A result for people, while the run goes on."""
    words = [
        f"{result['model']}, {result['num_ranks']} ranks, {result['experts_per_rank']} experts "
        f"each, {result['tokens_per_rank']:5d} tokens/rank:"
    ]
    words += [
        f"{name} {path['us']:.1f} us ({path['times_slower']:.2f}x, {path['distance']:.1e})"
        for name, path in result["paths"].items()
    ]
    return "  ".join(words)


Table = tuple[str, list[str], list[list[str]]]


LEGEND = (
    "tokens: of each GPU. Behind a path's name is how it multiplies them. times: the fastest "
    "engine's time over ours, our first. distance: 1 minus the cosine to the unrounded result, of "
    "our first and of that engine's."
)


def tables(reports: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Title, columns and rows: one table for each model and number of ranks."""
    made = []
    for report in reports:
        gpu = report["machine"]["gpu"]
        for model in dict.fromkeys(result["model"] for result in report["results"]):
            results = [result for result in report["results"] if result["model"] == model]
            results.sort(key=lambda result: result["tokens_per_rank"])
            num_ranks, experts = results[0]["num_ranks"], results[0]["experts_per_rank"]
            title = f"{model}, {gpu}, {spread(num_ranks)}, {experts} experts per GPU, µs"
            names = list(dict.fromkeys(name for result in results for name in result["paths"]))
            columns = ["tokens"]
            for name in names:
                timed = next(r["paths"][name] for r in results if name in r["paths"])
                columns.append(f"{report['labels'][name]}, {timed['tokens'].upper()}")
            columns += ["times", "distance", "other's"]
            made.append((title, columns, [row_of(result, names) for result in results]))
    return made


def page_table(report: Mapping[str, Any]) -> str:
    """A page's table of a report of one model on one GPU: µs of ours and of engines' kernels, with
    their time over ours in brackets."""
    results = sorted(report["results"], key=lambda result: result["tokens_per_rank"])
    names = list(dict.fromkeys(name for result in results for name in result["paths"]))

    def cell(name: str, path: Mapping[str, Any] | None) -> str:
        if path is None:
            return ""
        return f"{path['us']:.1f}" + ("" if name == OURS else f" ({path['times_slower']:.2f})")

    return markdown_table(
        ["tokens", *(report["labels"][name] for name in names)],
        [
            [
                str(result["tokens_per_rank"]),
                *(cell(name, result["paths"].get(name)) for name in names),
            ]
            for result in results
        ],
    )


def spread(num_ranks: int) -> str:
    return "no expert parallelism" if num_ranks == 1 else f"EP{num_ranks}"


def row_of(result: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    paths = result["paths"]
    others = {name: path for name, path in paths.items() if not name.startswith(OURS)}
    cells = [str(result["tokens_per_rank"])]
    cells += [f"{paths[name]['us']:.1f}" if name in paths else "" for name in names]
    if not others:
        return [*cells, "", f"{paths[OURS]['distance']:.1e}", ""]
    best = min(others.values(), key=lambda path: path["us"])
    distances = [f"{path['distance']:.1e}" for path in (paths[OURS], best)]
    return [*cells, f"{best['times_slower']:.2f}", *distances]


def absences(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every kernel that was not timed, at all or with some number of tokens, and why."""
    named: dict[str, None] = {}
    for report in reports:
        for name, reason in report["absent"].items():
            named[f"{name} was not timed: {reason}"] = None
        for result in report["results"]:
            where = f"{result['model']}, {spread(result['num_ranks'])}, "
            where += f"{result['tokens_per_rank']} tokens"
            for name, reason in result["failed"].items():
                named[f"{name} was not timed with {where}: {reason}"] = None
    return list(named)


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for title, columns, rows in tables(reports):
        lines += [f"**{title}**", "", markdown_table(columns, rows)]
    lines += [LEGEND, "", *(f"- {absence}" for absence in absences(reports))]
    return "\n".join(lines).rstrip() + "\n"


def show(reports: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    console = stdout()
    for title, columns, rows in tables(reports):
        table = new_table(title, *columns, right=("tokens", *columns[-3:]))
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(LEGEND)
    for absence in absences(reports):
        console.print(absence, markup=False)
    if path is not None:
        path.write_text(markdown(reports))


if __name__ == "__main__":
    main()
