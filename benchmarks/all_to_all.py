"""Times the split path's all-to-all on all GPUs of a machine, a process for each, beside NCCL's:
the low-latency one, or with --path throughput the one for many tokens.

    python -m benchmarks.all_to_all --json all_to_all.json
    python -m benchmarks.all_to_all --path throughput --zero-copy --token-format bf16
    torchrun --nproc-per-node 2 -m benchmarks.all_to_all --tokens 1 128

For every number of tokens: a dispatch and a combine are checked first; then the two are timed, in
turn with NCCL's all-to-all of the same bytes. NCCL's is given what it cannot have in a layer: sizes
that the host knows, and rows that lie ready. It neither quantizes nor places rows nor adds them:
its dispatch sends a token's values and scales once to every rank, its combine a BF16 row for every
slot.

A time is the median of --calls calls, of the slowest rank. In front of each call an all-reduce lets
ranks begin together, and in front of that the GPU sleeps, so that the host is never what is
measured. On a CPU, in the emulator, it is the host's clock. `in_a_row_us` is of a dispatch and a
combine together, in a CUDA graph of --pairs of them without anything in between; it needs GPUs.

Bytes are what the busiest link carries: a rank's own tokens stay where they are. `model_us` is the
time at one token and the bytes beyond those of one token at --link-share of the links' rate, which
is that of copies between GPUs (problem.MachineRates) and, measured here, of a large all-to-all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.formats.block_scaled import dequantize_e4m3_ue8m0
from deep_moe.formats.float_scaled import dequantize_e4m3_float
from deep_moe.heuristics.low_latency import CONTROL_BYTES, PLACEMENTS, Placement
from deep_moe.split.handle import Dispatched
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.split.throughput import AllToAll, AllToAllHandle
from deep_moe.tokens import TokenFormatName, token_format
from deep_moe.trial.timing import SLEEP_CYCLES, machine

from .mega_moe import run_on_gpus
from .problem import MachineRates
from .tables import markdown_table

TOKENS = {"low-latency": (1, 8, 32, 128), "throughput": (1, 1024, 2048, 4096, 8192)}
LARGE_BYTES = 1 << 28  # from each rank to all, for the links' rate
MAX_RELATIVE_ERROR = {"bf16": 0.01, "fp8_128": 0.05, "mxfp8": 0.05}


def main() -> None:
    arguments = parse_arguments()
    run_on_gpus(run_rank, arguments.ranks or torch.cuda.device_count(), arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", choices=sorted(TOKENS), default="low-latency")
    parser.add_argument("--tokens", nargs="+", type=int, help="per rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--token-format", choices=sorted(MAX_RELATIVE_ERROR), default="fp8_128")
    parser.add_argument(
        "--placement", choices=PLACEMENTS, default="ranks", help="of the low-latency path's tokens"
    )
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--sms", type=int, help="CTAs of a kernel; default: all SMs")
    parser.add_argument("--calls", type=int, default=40, help="of each step, at least")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=5, help="calls before those of a round")
    parser.add_argument("--pairs", type=int, default=20, help="in a CUDA graph")
    parser.add_argument("--zero-copy", action="store_true", help="rows are fetched, not sent")
    parser.add_argument("--link-share", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    if arguments.tokens is None:
        arguments.tokens = list(TOKENS[arguments.path])
    counts = (arguments.calls, arguments.rounds, arguments.pairs, *arguments.tokens)
    if min(counts) < 1:
        parser.error("--tokens, --calls, --rounds and --pairs must be at least 1")
    if not 0 < arguments.link_share <= 1:
        parser.error(f"--link-share must be in (0, 1]; got {arguments.link_share}")
    return arguments


@dataclass(frozen=True)
class Problem:
    """What both paths are asked. token_format: how tokens travel. placement: where the low-latency
    path's go; the library's go once to each rank in either case."""

    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    token_format: TokenFormatName
    placement: Placement = "ranks"

    @property
    def num_experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def token_bytes(self) -> int:
        """Values and scales of a token on its way.

        >>> Problem(2, 8, 2, 7168, "fp8_128").token_bytes
        7392
        """
        format = token_format(self.token_format)
        scales = 4 * (self.hidden // 128) if format.values_per_scale else 0
        return format.num_bytes(self.hidden) + scales


@dataclass(frozen=True)
class Routes:
    """Where one rank's tokens go.

    tokens_to: tokens with an expert on each rank. rows_to: their slots there.
    """

    topk_idx: torch.Tensor  # [tokens, topk]
    tokens_to: list[int]
    rows_to: list[int]

    @classmethod
    def drawn(cls, problem: Problem, num_tokens: int, rank: int, seed: int) -> Routes:
        """Each token's experts are different ones.

        >>> routes = Routes.drawn(Problem(2, 8, 2, 128, "bf16"), 16, rank=0, seed=0)
        >>> sum(routes.rows_to), max(routes.tokens_to) <= 16
        (32, True)
        """
        generator = torch.Generator().manual_seed(1_000_003 * seed + 7919 * rank + num_tokens)
        order = torch.rand(num_tokens, problem.num_experts, generator=generator)
        topk_idx = order.topk(problem.num_topk, dim=1).indices
        ranks = topk_idx // problem.num_experts_per_rank
        return cls(
            topk_idx,
            [int((ranks == other).any(dim=1).sum()) for other in range(problem.num_ranks)],
            [int((ranks == other).sum()) for other in range(problem.num_ranks)],
        )


def all_routes(problem: Problem, num_tokens: int, seed: int) -> list[Routes]:
    """Of every rank."""
    return [Routes.drawn(problem, num_tokens, rank, seed) for rank in range(problem.num_ranks)]


def link_bytes(routes: Sequence[Routes], problem: Problem) -> dict[str, int]:
    """What each step takes over the busiest rank's links, in its busier direction.

    >>> away = Routes(torch.ones(3, 1), [0, 3], [0, 3])
    >>> stays = Routes(torch.ones(2, 1), [0, 2], [0, 2])
    >>> link_bytes([away, stays], Problem(2, 2, 1, 128, "bf16"))
    {'dispatch': 768, 'combine': 768}
    >>> several = Routes(torch.ones(3, 2), [0, 3], [0, 6])
    >>> link_bytes([several, stays], Problem(2, 4, 2, 128, "bf16", "experts"))
    {'dispatch': 1632, 'combine': 1536}
    """
    by_expert = problem.placement == "experts"
    sent = [r.rows_to if by_expert else r.tokens_to for r in routes]
    message_bytes = problem.token_bytes + (CONTROL_BYTES if by_expert else 0)

    def busiest(counts: Sequence[Sequence[int]]) -> int:
        ranks = range(len(counts))
        leaving = [sum(counts[r]) - counts[r][r] for r in ranks]
        coming = [sum(counts[other][r] for other in ranks) - counts[r][r] for r in ranks]
        return max(*leaving, *coming)

    return {
        "dispatch": busiest(sent) * message_bytes,
        "combine": busiest([r.rows_to for r in routes]) * 2 * problem.hidden,
    }


def as_bf16(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Received rows before they were quantized, about."""
    if scales is None:
        return rows
    if scales.dtype == torch.float32:
        return dequantize_e4m3_float(rows, scales, torch.bfloat16)
    return dequantize_e4m3_ue8m0(rows, scales).bfloat16()


def checked_error(out: torch.Tensor, expected: torch.Tensor, format: str) -> float:
    """How far sums are from what they should be, relative to the largest of those. Raises
    RuntimeError if it is too far."""
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    if not error < MAX_RELATIVE_ERROR[format]:
        raise RuntimeError(f"combined tokens are off by {error} of the largest value")
    return error


class LowLatencySteps:
    """One rank's dispatch and combine of the same tokens, again and again."""

    def __init__(self, layer: LowLatencyAllToAll, routes: Routes, zero_copy: bool) -> None:
        shape, device = layer.shape, layer.device
        num_tokens = routes.topk_idx.shape[0]
        self.layer = layer
        self.zero_copy = zero_copy
        self.topk_idx = routes.topk_idx.to(device)
        self.x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
        self.topk_weights = torch.rand(num_tokens, shape.num_topk, device=device) + 0.1
        size = (shape.num_experts_per_rank, shape.num_rows_per_expert, shape.hidden)
        self.y = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.x)
        self.result: Dispatched | None = None

    def dispatch(self) -> None:
        self.result = self.layer.dispatch(self.x, self.topk_idx)

    def combine(self) -> None:
        assert self.result is not None
        handle = self.result.handle
        y = self.layer.get_combine_buffer(handle) if self.zero_copy else self.y
        self.layer.combine(
            y, self.topk_idx, self.topk_weights, handle, self.out, zero_copy=self.zero_copy
        )

    def check(self) -> float:
        """Experts give back what they get; how far the sums are from what that makes."""
        self.dispatch()
        assert self.result is not None
        result = self.result
        y = self.layer.get_combine_buffer(result.handle) if self.zero_copy else self.y
        y.copy_(as_bf16(result.recv_x, result.scales))
        self.combine()
        expected = self.x.double() * self.topk_weights.double().sum(dim=1, keepdim=True)
        return checked_error(self.out, expected, self.layer.shape.token_format)


class ThroughputSteps:
    """The same of the path for many tokens."""

    def __init__(self, layer: AllToAll, routes: Routes, zero_copy: bool, format: str) -> None:
        shape, device = layer.shape, layer.device
        num_tokens = routes.topk_idx.shape[0]
        self.layer = layer
        self.zero_copy = zero_copy
        self.format = format
        self.topk_idx = routes.topk_idx.to(device)
        self.x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
        self.topk_weights = torch.rand(num_tokens, shape.num_topk, device=device) + 0.1
        if not zero_copy:
            size = (shape.max_recv_rows, shape.hidden)
            self.y = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.x)
        self.handle: AllToAllHandle | None = None

    def dispatch(self) -> None:
        self.received, self.handle = self.layer.dispatch(self.x, self.topk_idx)

    def combine(self) -> None:
        assert self.handle is not None
        y = self.layer.get_combine_buffer() if self.zero_copy else self.y
        self.layer.combine(y, self.handle, topk_weights=self.topk_weights, out=self.out)

    def check(self) -> float:
        """As of the low-latency path."""
        self.dispatch()
        y = self.layer.get_combine_buffer() if self.zero_copy else self.y
        num_rows = int(self.received.num_rows)
        scales = self.received.x_sf
        y[:num_rows] = as_bf16(
            self.received.x[:num_rows], None if scales is None else scales[:num_rows]
        )
        self.combine()
        expected = self.x.double() * self.topk_weights.double().sum(dim=1, keepdim=True)
        return checked_error(self.out, expected, self.format)


class LibrarySteps:
    """The same bytes by torch.distributed's all-to-all: NCCL on GPUs."""

    def __init__(
        self, problem: Problem, routes: Sequence[Routes], rank: int, device: torch.device
    ) -> None:
        def buffers(
            counts: Sequence[Sequence[int]], row_bytes: int
        ) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
            sent = list(counts[rank])
            received = [of_rank[rank] for of_rank in counts]
            size: dict[str, Any] = {"dtype": torch.uint8, "device": device}
            return (
                torch.empty(sum(received), row_bytes, **size),
                torch.zeros(sum(sent), row_bytes, **size),
                received,
                sent,
            )

        self._tokens = buffers([r.tokens_to for r in routes], problem.token_bytes)
        rows = [r.rows_to for r in routes]
        self._rows = buffers(list(zip(*rows, strict=True)), 2 * problem.hidden)

    def dispatch(self) -> None:
        dist.all_to_all_single(*self._tokens)

    def combine(self) -> None:
        dist.all_to_all_single(*self._rows)


def run_rank(device: torch.device, arguments: argparse.Namespace) -> None:
    """One process: all sizes."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(arguments.seed + rank)
    problem = Problem(
        num_ranks,
        arguments.experts,
        arguments.topk,
        arguments.hidden,
        arguments.token_format,
        arguments.placement,
    )
    layer = make_layer(problem, device, arguments)
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "num_ranks": num_ranks,
        "buffer_bytes": layer.nbytes,
        "rates": asdict(MachineRates.of_device(device)),
        "large_all_to_all_bytes_per_s": large_rate(device) if device.type == "cuda" else None,
        "results": [],
    }
    for num_tokens in arguments.tokens:
        report["results"].append(result_of(layer, problem, num_tokens, arguments))
        if rank == 0:
            add_models(report, arguments.link_share)
            print(line(report["results"][-1]), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    layer.check()
    dist.barrier()
    layer.close()


def make_layer(
    problem: Problem, device: torch.device, arguments: argparse.Namespace
) -> LowLatencyAllToAll | AllToAll:
    """Of the path that is asked for, with room for every number of tokens."""
    if arguments.path == "low-latency":
        return LowLatencyAllToAll(
            dist.group.WORLD,
            max(arguments.tokens),
            problem.hidden,
            problem.num_experts,
            problem.num_topk,
            token_format=problem.token_format,
            placement=problem.placement,
            zero_copy=arguments.zero_copy,
            device=device,
            num_sms=arguments.sms,
        )
    alignment = 128
    most_rows = max(
        sum(routes.rows_to[rank] for routes in all_routes(problem, num_tokens, arguments.seed))
        for num_tokens in arguments.tokens
        for rank in range(problem.num_ranks)
    )
    return AllToAll(
        dist.group.WORLD,
        max(arguments.tokens),
        problem.hidden,
        problem.num_experts,
        problem.num_topk,
        most_rows + problem.num_experts_per_rank * alignment,
        expert_alignment=alignment,
        token_format=problem.token_format,
        device=device,
        num_sms=arguments.sms,
    )


def result_of(
    layer: LowLatencyAllToAll | AllToAll,
    problem: Problem,
    num_tokens: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    device, rank = layer.device, layer.rank
    routes = all_routes(problem, num_tokens, arguments.seed)
    own: LowLatencySteps | ThroughputSteps
    if isinstance(layer, AllToAll):
        own = ThroughputSteps(layer, routes[rank], arguments.zero_copy, problem.token_format)
    else:
        own = LowLatencySteps(layer, routes[rank], arguments.zero_copy)
    library = LibrarySteps(problem, routes, rank, device)
    error = own.check()
    steps: dict[str, Callable[[], None]] = {
        "dispatch": own.dispatch,
        "combine": own.combine,
        "library_dispatch": library.dispatch,
        "library_combine": library.combine,
    }
    times = timed_steps(steps, arguments, device)
    num_bytes = link_bytes(routes, problem)
    result: dict[str, Any] = {"tokens_per_rank": num_tokens, "relative_error": error}
    for step in ("dispatch", "combine"):
        of_step = times[step] | {"link_bytes": num_bytes[step]}
        of_step["library_us"] = times[f"library_{step}"]["us"]
        of_step["times_faster"] = of_step["library_us"] / of_step["us"]
        result[step] = of_step
    if device.type == "cuda":
        pairs = {"in_a_row_us": own, "library_in_a_row_us": library}
        for name, path in pairs.items():
            result[name] = in_a_row_us((path.dispatch, path.combine), arguments, device)
    return result


def timed_steps(
    steps: dict[str, Callable[[], None]], arguments: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Each step's time, all of them one behind the other in every call."""
    own: dict[str, list[float]] = {name: [] for name in steps}
    calls_per_round = -(-arguments.calls // arguments.rounds)
    for _ in range(arguments.rounds):
        events = []
        for _ in range(arguments.warmup + calls_per_round):
            events.append({name: run_timed(step, device) for name, step in steps.items()})
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for call in events[arguments.warmup :]:
            for name, elapsed_us in call.items():
                own[name].append(elapsed_us())
    return {name: over_ranks(times, device) for name, times in own.items()}


def run_timed(step: Callable[[], None], device: torch.device) -> Callable[[], float]:
    """Run a step behind an all-reduce; its microseconds, once the device is done."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda._sleep(SLEEP_CYCLES)
    dist.all_reduce(torch.zeros(1, device=device))
    if not on_gpu:
        before = time.perf_counter()
        step()
        elapsed = 1e6 * (time.perf_counter() - before)
        return lambda: elapsed
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    return lambda: 1e3 * start.elapsed_time(end)


def over_ranks(times_us: Sequence[float], device: torch.device) -> dict[str, Any]:
    """The slowest rank's median, and what lies around it."""
    mine = torch.tensor(times_us, dtype=torch.float64, device=device)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    medians = [statistics.median(times.tolist()) for times in ranks]
    slowest = sorted(ranks[medians.index(max(medians))].tolist())
    return {
        "us": max(medians),
        "us_p10": slowest[round(0.1 * (len(slowest) - 1))],
        "us_p90": slowest[round(0.9 * (len(slowest) - 1))],
        "us_of_ranks": medians,
    }


def in_a_row_us(
    steps: Sequence[Callable[[], None]], arguments: argparse.Namespace, device: torch.device
) -> float:
    """Of one pair, among many in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(arguments.pairs):
            for step in steps:
                step()
    dist.barrier()
    replays = [run_timed(graph.replay, device) for _ in range(arguments.warmup + arguments.rounds)]
    torch.cuda.synchronize(device)
    times = [elapsed_us() / arguments.pairs for elapsed_us in replays[arguments.warmup :]]
    return float(over_ranks(times, device)["us"])


def large_rate(device: torch.device) -> float:
    """Bytes per second that leave a rank in a large all-to-all."""
    num_ranks = dist.get_world_size()
    size = LARGE_BYTES // num_ranks * num_ranks
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    calls = [run_timed(lambda: dist.all_to_all_single(received, sent), device) for _ in range(8)]
    torch.cuda.synchronize(device)
    us = over_ranks([elapsed_us() for elapsed_us in calls[3:]], device)["us"]
    return size * (num_ranks - 1) / num_ranks / (1e-6 * us)


def add_models(report: dict[str, Any], link_share: float) -> None:
    """To each result, what the first one's times and the links' rate let expect. The first number
    of tokens should be 1."""
    first = report["results"][0]
    rate = link_share * report["rates"]["link_bytes_per_s"]
    for result in report["results"]:
        for step in ("dispatch", "combine"):
            more = result[step]["link_bytes"] - first[step]["link_bytes"]
            result[step]["model_us"] = first[step]["us"] + 1e6 * more / rate


def line(result: dict[str, Any]) -> str:
    """A result for people."""
    words = [f"{result['tokens_per_rank']:5d} tokens/rank"]
    for step in ("dispatch", "combine"):
        found = result[step]
        words.append(
            f"{step} {found['us']:6.1f} us ({found['us_p10']:.1f} to {found['us_p90']:.1f}; "
            f"{found['link_bytes'] / 1e6:.2f} MB; model {found['model_us']:.1f}; "
            f"library {found['library_us']:.1f})"
        )
    if "in_a_row_us" in result:
        words.append(
            f"in a row {result['in_a_row_us']:.1f} us, library {result['library_in_a_row_us']:.1f}"
        )
    return "  ".join(words)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, µs."""
    steps = ("dispatch", "combine", "both in a graph")
    columns = ["tokens per rank", *(name for step in steps for name in (step, "NCCL"))]
    rows = []
    for result in results:
        us = [result[step][time] for step in steps[:2] for time in ("us", "library_us")]
        us += [result["in_a_row_us"], result["library_in_a_row_us"]]
        rows.append([str(result["tokens_per_rank"]), *(f"{time:.1f}" for time in us)])
    return markdown_table(columns, rows)


if __name__ == "__main__":
    main()
