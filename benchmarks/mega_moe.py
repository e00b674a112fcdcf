"""Times the fused layer on all GPUs of a machine, a process for each.

    python -m benchmarks.mega_moe --model deepseek-v4-pro --json pro.json
    torchrun --nproc-per-node 4 -m benchmarks.mega_moe --unfused --peer
    python -m benchmarks.mega_moe --topk 4 --experts 128 --routing zipf --shares 1 1 0.5 0

For every number of tokens: the call's result is compared with the reference first (some tokens of
each rank) and the tokens that experts received are counted; then the call is timed, in turn with
the same layer without fusion and with sgl-deep-gemm's kernel, if asked for. A wrong result ends the
run with an error.

A time is the median of --calls calls, of the slowest rank; see deep_moe.trial.timing. They are
taken in --rounds rounds, each after --warmup calls, so that no path has the chip cool to itself.
`floor` is what reading the weights, computing or the links alone would take the busiest rank at the
rates of `problem.MachineRates`. With the sizes of a published model, uniform routing and equal
tokens, the result is also compared with published.json. Compiled kernels go to the cache folder
(DEEP_MOE_CACHE_DIR).

With --trace one more call of each size is recorded by a kernel that takes time stamps
(deep_moe.trial.trace): its phases are part of the results and printed behind each model, and
everything that every warp did, on all ranks, is written as a Chrome trace, a file for each size;
with --html as a page for any browser.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.activations import Swiglu
from deep_moe.cli.layer_options import LayerOptions
from deep_moe.cli.options import parse_overrides
from deep_moe.heuristics import PRESETS, MoEShape
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.targets import target_of_device
from deep_moe.tokens import TOKEN_FORMATS
from deep_moe.traces.page import write_page
from deep_moe.trial import trace
from deep_moe.trial.comparison import compare
from deep_moe.trial.rank_processes import run_in_group, run_on_ranks
from deep_moe.trial.real_size import ROUTINGS, rank_tokens
from deep_moe.trial.synthetic import Tokens
from deep_moe.trial.timing import TimedLayer, machine, timed
from deep_moe.weights import DEFAULT_WEIGHTS, WEIGHTS

from . import peer, published
from .peer import PeerLayer
from .problem import (
    CallCosts,
    MachineRates,
    bytes_per_weight,
    call_costs,
    checked_sample,
    rank_weights,
)
from .unfused import UnfusedLayer

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("deepseek-v4-flash", "deepseek-v4-pro")
SIZES = {
    "experts": "num_experts",
    "topk": "num_topk",
    "hidden": "hidden",
    "intermediate": "intermediate_hidden",
}
MAX_PATH_DISTANCE = 0.01  # cosine, between paths that scale FP8 differently


def main() -> None:
    arguments = parse_arguments()
    # sgl-deep-gemm takes a symmetric tensor to begin where its allocation does; from a pool it may
    # not.
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    run_on_gpus(run_rank, arguments.ranks or torch.cuda.device_count(), arguments)


def run_on_gpus(work: Callable[..., None], num_ranks: int, arguments: argparse.Namespace) -> None:
    """Run work(device, arguments) in a process for each rank, if there are as many GPUs; as one of
    the ranks, where torchrun has made the processes."""
    if "RANK" in os.environ:
        run_in_group(work, torch.device("cuda", int(os.environ["LOCAL_RANK"])), (arguments,))
        return
    if not 1 <= num_ranks <= torch.cuda.device_count():
        raise SystemExit(
            f"--ranks must be 1 to the number of GPUs ({torch.cuda.device_count()}); "
            f"got {num_ranks}"
        )
    run_on_ranks(work, num_ranks, "cuda", arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=sorted(PRESETS), default=list(MODELS))
    for option, field in SIZES.items():
        parser.add_argument(f"--{option}", type=int, help=f"{field}, instead of the model's")
    parser.add_argument("--weights", choices=WEIGHTS, default=DEFAULT_WEIGHTS)
    parser.add_argument("--token-format", choices=TOKEN_FORMATS, help="default: the weights' own")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="per rank")
    parser.add_argument(
        "--pool-tokens",
        type=int,
        help="rows of the pool, used again in a call that brings more; 0: as many as it may bring; "
        f"default: {DEFAULT_POOL_TOKENS}",
    )
    parser.add_argument("--shared-experts", type=int, default=0, help="beside those of routing")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=[1.0],
        help="of --tokens, for each rank in turn: 1 1 0.5 0; the last rank may begin them again",
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--calls", type=int, default=20, help="of each path, at least")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=5, help="calls before those of a round")
    parser.add_argument("--clamp", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checked-tokens", type=int, default=8, help="compared, on each rank")
    parser.add_argument("--unfused", action="store_true", help="time the unfused layer too")
    parser.add_argument("--peer", action="store_true", help="time sgl-deep-gemm's kernel too")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json.gz",
        help="record a call too; model and tokens are added to the file's name",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="record a call too, as a page for any browser; named as --trace's files",
    )
    parser.add_argument("--override", action="append", help="FIELD=VALUE of the config")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    if min(arguments.calls, arguments.rounds) < 1:
        parser.error("--calls and --rounds must be at least 1")
    if min(arguments.tokens) < 1 or min(arguments.shares) < 0 or max(arguments.shares) == 0:
        parser.error("--tokens must be positive, --shares not negative and not all 0")
    if arguments.shared_experts and (arguments.unfused or arguments.peer):
        parser.error("--shared-experts: --unfused and --peer time layers without them")
    return arguments


def run_rank(device: torch.device, arguments: argparse.Namespace) -> None:
    """One process: all models, all sizes."""
    has_peer = arguments.peer and peer.is_available()
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {
            name: str(value) for name, value in vars(arguments).items() if name != "json"
        },
        "peer": f"sgl-deep-gemm {peer.version()}" if has_peer else None,
        "rates": asdict(MachineRates.of_device(device)),
        "results": [],
    }
    if arguments.peer and not has_peer and dist.get_rank() == 0:
        print("--peer: no sgl-deep-gemm with the kernel for Hopper (README.md)", flush=True)
    for model in arguments.model:
        phases = {}
        for result in model_results(model, arguments, device):
            comparison = published.compared(result, report["machine"]["gpu"])
            if comparison is not None:
                result["published"] = comparison
            report["results"].append(result)
            if "trace" in result:
                phases[str(result["tokens_per_rank"])] = result["trace"]
            if dist.get_rank() == 0:
                print(line(result), flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        if phases and dist.get_rank() == 0:
            print(f"{model}, tokens/rank:\n{trace.table(phases)}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def tokens_of_ranks(num_tokens: int, shares: Sequence[float], num_ranks: int) -> list[int]:
    """
    >>> tokens_of_ranks(100, [1, 0.5, 0], 4)
    [100, 50, 0, 100]
    """
    return [round(num_tokens * shares[rank % len(shares)]) for rank in range(num_ranks)]


def model_name(model: str, arguments: argparse.Namespace) -> str:
    """The model, and what of it is changed.

    >>> model_name("deepseek-v3", parse_arguments(["--topk", "4"]))
    'deepseek-v3, topk 4'
    >>> model_name("deepseek-v3", parse_arguments(["--weights", "fp8"]))
    'deepseek-v3, weights fp8'
    """
    given = {option: getattr(arguments, option) for option in SIZES}
    given["pool tokens"] = arguments.pool_tokens
    given["shared experts"] = arguments.shared_experts or None
    if arguments.weights != DEFAULT_WEIGHTS:
        given["weights"] = arguments.weights
    if arguments.token_format is not None:
        given["tokens"] = arguments.token_format
    changed = [f"{option} {value}" for option, value in given.items() if value is not None]
    return ", ".join([model, *changed])


def model_results(
    model: str, arguments: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A result for each number of tokens."""
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shares = [tokens_of_ranks(n, arguments.shares, num_ranks) for n in arguments.tokens]
    options = LayerOptions(
        model=model,
        pool_tokens=arguments.pool_tokens,
        shared_experts=arguments.shared_experts,
        weights=arguments.weights,
        token_format=arguments.token_format,
        activation="swiglu",
        **{option: getattr(arguments, option) for option in SIZES},
    )
    shape = options.shape(num_ranks, max(map(max, shares)), arch=target_of_device(device).name)
    layer = rank_weights(shape, rank, arguments.seed, device)
    weight_bytes = bytes_per_weight(layer)
    fused = TimedLayer(shape, layer, device)
    unfused = UnfusedLayer(shape, layer, group) if arguments.unfused else None
    other = PeerLayer(shape, layer, group) if arguments.peer and peer.is_available() else None
    del layer
    for num_tokens, counts in zip(arguments.tokens, shares, strict=True):
        tokens = rank_tokens(
            shape, counts[rank], rank, arguments.seed, device, routing=arguments.routing
        )
        result: dict[str, Any] = {
            "model": model_name(model, arguments),
            "layer": {field: getattr(shape, field) for field in SIZES.values()},
            "weights": arguments.weights,
            "token_format": shape.token_format,
            "num_pool_tokens": shape.num_pool_tokens,
            "num_shared_experts": arguments.shared_experts,
            "num_ranks": num_ranks,
            "tokens_per_rank": num_tokens,
            "tokens_of_ranks": counts,
            "routing": arguments.routing,
        }
        fused.fill(tokens)
        sent = sent_tokens(shape, tokens)
        result |= checked_call(fused, tokens, sent, arguments)

        calls: dict[str, Callable[[], Any]] = {"fused": fused_call(fused, arguments)}
        distances = {}
        if unfused is not None:
            inputs = (*unfused.prepare(tokens), tokens.topk_idx, tokens.topk_weights)
            calls["unfused"] = partial(unfused, *inputs, Swiglu(arguments.clamp))
        if other is not None:
            other.fill(tokens, max(counts))
            calls["peer"] = partial(other, torch.empty_like(fused.y), arguments.clamp)
        for name in list(calls)[1:]:
            distances[name] = compare(calls[name](), fused.y).cosine_distance
            if distances[name] > MAX_PATH_DISTANCE:
                raise RuntimeError(
                    f"{name} is {distances[name]} away from the fused layer, as an angle"
                )
        times = measured(calls, arguments, call_costs(shape, sent, weight_bytes), device)
        result |= times.pop("fused")
        for name, of_path in times.items():
            of_path["cosine_distance"] = distances[name]
            result[name] = of_path | {"times_slower": of_path["us"] / result["us"]}
        if arguments.trace is not None or arguments.html is not None:
            result["trace"] = traced(fused, arguments, result["model"], num_tokens)
        yield result
    fused.close()


def fused_call(fused: TimedLayer, arguments: argparse.Namespace) -> partial[None]:
    return partial(fused, Swiglu(arguments.clamp), parse_overrides(arguments.override))


def sent_tokens(shape: MoEShape, tokens: Tokens) -> torch.Tensor:
    """[ranks, experts], on the host: tokens that each rank has for each expert."""
    own = torch.bincount(tokens.topk_idx.flatten(), minlength=shape.num_experts)
    sent = [torch.empty_like(own) for _ in range(shape.num_ranks)]
    dist.all_gather(sent, own)
    return torch.stack(sent).cpu()


def checked_call(
    fused: TimedLayer, tokens: Tokens, sent: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Call once and compare; the kernel's config and how near it came."""
    shape, buffer = fused.shape, fused.buffer
    call = fused_call(fused, arguments)
    stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32, device=buffer.device)
    started = time.perf_counter()
    call(stats=stats)
    buffer.memory.synchronize()
    first_call_s = time.perf_counter() - started
    buffer.raise_if_failed()

    own = sent.sum(0).view(shape.num_ranks, -1)[buffer.rank]
    if not torch.equal(own.int(), stats.cpu()):
        raise RuntimeError(f"experts received {stats.tolist()}, not {own.tolist()}")
    if bool(fused.y.isnan().any()):
        raise RuntimeError("the result holds NaN")
    comparison = checked_sample(
        shape,
        tokens,
        fused.y,
        arguments.checked_tokens,
        arguments.seed,
        Swiglu(arguments.clamp),
    )
    config = fused.config(Swiglu(arguments.clamp), parse_overrides(arguments.override))
    return {
        "config": config.tunable,
        "tuning": config.explain().tuning.outcome,
        "first_call_s": first_call_s,
        "checked_tokens": comparison.num_tokens,
        "cosine_distance": comparison.cosine_distance,
    }


def measured(
    calls: Mapping[str, Callable[[], Any]],
    arguments: argparse.Namespace,
    costs: CallCosts,
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Times of each path, which take turns, and what they mean."""
    times: dict[str, list[list[float]]] = {
        name: [[] for _ in range(dist.get_world_size())] for name in calls
    }
    host_us: dict[str, list[float]] = {name: [] for name in calls}
    calls_per_round = -(-arguments.calls // arguments.rounds)
    for _ in range(arguments.rounds):
        for name, call in calls.items():
            ranks, host = timed(call, arguments.warmup, calls_per_round, device)
            host_us[name].append(host)
            for known, new in zip(times[name], ranks, strict=True):
                known += new
    rates = MachineRates.of_device(device)
    return {
        name: summary(times[name], costs, rates) | {"host_us": statistics.median(host_us[name])}
        for name in calls
    }


def summary(
    times: Sequence[Sequence[float]], costs: CallCosts, rates: MachineRates
) -> dict[str, Any]:
    """times: seconds of each rank's calls."""
    medians = [statistics.median(calls) for calls in times]
    seconds = max(medians)
    slowest = sorted(times[medians.index(seconds)])

    def percentile(percent: int) -> float:
        return slowest[round(percent / 100 * (len(slowest) - 1))]

    return {
        "us": 1e6 * seconds,
        "us_p10": 1e6 * percentile(10),
        "us_p90": 1e6 * percentile(90),
        "slowest_rank": medians.index(seconds),
        "us_of_ranks": [1e6 * median for median in medians],
        "tflops": costs.flops / seconds / 1e12,
        "weight_tb_per_s": costs.weight_bytes / seconds / 1e12,
        "floor_us": 1e6 * costs.floor_s(rates),
        "floor_share": costs.floor_s(rates) / seconds,
    }


def trace_path(path: Path, model: str, num_tokens: int) -> Path:
    """model: as `model_name` has it.

    >>> trace_path(Path("out/layer.json.gz"), "deepseek-v4-pro, pool tokens 24576", 8).as_posix()
    'out/layer-deepseek-v4-pro-pool-tokens-24576-8.json.gz'
    """
    name, dot, endings = path.name.partition(".")
    model = model.replace(",", "").replace(" ", "-")
    return path.with_name(f"{name}-{model}-{num_tokens}{dot}{endings}")


def traced(
    fused: TimedLayer, arguments: argparse.Namespace, model: str, num_tokens: int
) -> dict[str, Any]:
    """Where the time of a call goes, on all ranks; the first of them writes the trace and the page
    that are asked for."""
    with trace.record(fused.buffer) as (recorder,):
        timed(fused_call(fused, arguments), arguments.warmup, 1, fused.buffer.device)
        own = recorder.collect()
    gathered: list[trace.RankTrace] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    ranks = trace.aligned(gathered)
    if dist.get_rank() == 0:
        if arguments.trace is not None:
            trace.write_chrome_trace(ranks, trace_path(arguments.trace, model, num_tokens))
        if arguments.html is not None:
            page = trace_path(arguments.html, model, num_tokens)
            title = f"{model}, {num_tokens} tokens per rank"
            write_page(trace.timeline_of(ranks), page, title=title)
    return trace.breakdown(ranks)


def line(result: Mapping[str, Any]) -> str:
    """A result for people."""
    text = (
        f"{result['model']:18s} {result['tokens_per_rank']:5d} tokens/rank  "
        f"{result['us']:8.1f} us ({result['us_p10']:.1f} to {result['us_p90']:.1f})  "
        f"{result['tflops']:6.0f} TFLOPS  {result['weight_tb_per_s']:5.2f} TB/s  "
        f"{result['floor_share']:4.0%} of floor  block_m {result['config']['block_m']}"
    )
    for name in ("unfused", "peer"):
        if name in result:
            other = result[name]
            text += f"  {name} {other['us']:.1f} us ({other['times_slower']:.2f}x)"
    if "published" in result:
        text += f"  {published.words(result['published'])}"
    return text


if __name__ == "__main__":
    main()
