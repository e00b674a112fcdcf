"""Times the fused layer on all GPUs of a machine, a process for each.

    python -m benchmarks.mega_moe --model deepseek-v4-pro --json pro.json
    torchrun --nproc-per-node 4 -m benchmarks.mega_moe --unfused --peer

For every number of tokens: the call's result is compared with the reference first (some tokens of
each rank) and the tokens that experts received are counted; then the call is timed on its own and,
if asked for, beside the same layer without fusion and beside sgl-deep-gemm's kernel. A wrong result
ends the run with an error.

A time is the median of --calls calls after --warmup, of the slowest rank. In front of each call
there is an all-reduce, so that ranks begin together, and in front of that the GPU sleeps, so that
the host is never what is measured. `floor` is what reading the weights, computing or the links
alone would take at the rates of `problem.MachineRates`. Compiled kernels go to the cache folder
(DEEP_MOE_CACHE_DIR).

With --trace one more call of each size is recorded by a kernel that takes time stamps
(deep_moe.trace): its phases are part of the results and printed behind each model, and everything
that every warp did, on all ranks, is written as a Chrome trace, a file for each size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deep_moe
from deep_moe import trace
from deep_moe.cli.options import parse_overrides
from deep_moe.comparison import compare
from deep_moe.heuristics import PRESETS, MoEShape, choose_config, preset_shape
from deep_moe.reference import NUMERICS
from deep_moe.synthetic import Layer, Tokens
from deep_moe.trial import fill_inputs
from deep_moe.weights import weight_arch

from .peer import PeerLayer, is_available
from .problem import (
    CallCosts,
    MachineRates,
    call_costs,
    rank_layer,
    rank_tokens,
    reference_sample,
)
from .unfused import UnfusedLayer

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("deepseek-v4-flash", "deepseek-v4-pro")
SLEEP_CYCLES = 2_000_000  # about a millisecond
MAX_PATH_DISTANCE = 0.01  # cosine, between paths that scale FP8 differently


def main() -> None:
    arguments = parse_arguments()
    # sgl-deep-gemm takes a symmetric tensor to begin where its allocation does; from a pool it may
    # not.
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    if "RANK" in os.environ:  # torchrun has made the processes
        run_rank(int(os.environ["LOCAL_RANK"]), arguments, None)
        return
    num_ranks = arguments.ranks or torch.cuda.device_count()
    if not 1 <= num_ranks <= torch.cuda.device_count():
        raise SystemExit(
            f"--ranks must be 1 to the number of GPUs ({torch.cuda.device_count()}); "
            f"got {num_ranks}"
        )
    with tempfile.TemporaryDirectory(prefix="deep_moe_benchmark_") as folder:
        arguments.ranks = num_ranks
        torch.multiprocessing.spawn(run_rank, args=(arguments, folder), nprocs=num_ranks)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=sorted(PRESETS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="per rank")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
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
    parser.add_argument("--override", action="append", help="FIELD=VALUE of the config")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    return parser.parse_args(words)


def run_rank(local_rank: int, arguments: argparse.Namespace, folder: str | None) -> None:
    """One process: all models, all sizes."""
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if folder is None:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=local_rank,
            world_size=arguments.ranks,
            device_id=device,
        )
    try:
        report: dict[str, Any] = {
            "machine": machine(arguments.commit),
            "arguments": {
                name: str(value) for name, value in vars(arguments).items() if name != "json"
            },
            "rates": asdict(MachineRates()),
            "results": [],
        }
        for model in arguments.model:
            phases = {}
            for result in model_results(model, arguments, device):
                report["results"].append(result)
                if "trace" in result:
                    phases[str(result["tokens_per_rank"])] = result["trace"]
                if dist.get_rank() == 0:
                    print(line(result), flush=True)
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
            if phases and dist.get_rank() == 0:
                print(f"{model}, tokens/rank:\n{trace.table(phases)}", flush=True)
            torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()


def model_results(
    model: str, arguments: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A result for each number of tokens."""
    group, rank = dist.group.WORLD, dist.get_rank()
    shape = preset_shape(
        model, num_ranks=dist.get_world_size(), num_max_tokens_per_rank=max(arguments.tokens)
    )
    layer = rank_layer(shape, rank, arguments.seed, device)
    fused = FusedLayer(shape, layer, parse_overrides(arguments.override))
    unfused = UnfusedLayer(shape, layer, group) if arguments.unfused else None
    peer = PeerLayer(shape, layer, group) if arguments.peer and is_available() else None
    del layer
    for num_tokens in arguments.tokens:
        tokens = rank_tokens(shape, num_tokens, rank, arguments.seed, device)
        result: dict[str, Any] = {
            "model": model,
            "num_ranks": shape.num_ranks,
            "tokens_per_rank": num_tokens,
        }
        fused.fill(tokens)
        result |= fused.checked_call(tokens, arguments)
        costs = call_costs(shape, fused.received_by_all())

        result |= measured(partial(fused, arguments.clamp), arguments, costs)
        others: dict[str, Callable[[], torch.Tensor]] = {}
        if unfused is not None:
            inputs = (*unfused.prepare(tokens), tokens.topk_idx, tokens.topk_weights)
            others["unfused"] = partial(unfused, *inputs, arguments.clamp)
        if peer is not None:
            peer.fill(tokens)
            others["peer"] = partial(peer, torch.empty_like(fused.y), arguments.clamp)
        for name, call in others.items():
            distance = compare(call(), fused.y).cosine_distance
            if distance > MAX_PATH_DISTANCE:
                raise RuntimeError(f"{name} is {distance} away from the fused layer, as an angle")
            times = measured(call, arguments, costs)
            times["cosine_distance"] = distance
            result[name] = times | {"times_slower": times["us"] / result["us"]}
        if arguments.trace is not None:
            path = trace_path(arguments.trace, model, num_tokens)
            result["trace"] = traced(fused, arguments, path)
        yield result
    dist.barrier()  # no rank takes its memory away while another still uses it
    fused.buffer.close()


class FusedLayer:
    """One rank's part of our kernel."""

    def __init__(self, shape: MoEShape, layer: Layer, overrides: dict[str, int]) -> None:
        self.shape = shape
        self.overrides = overrides
        self.buffer = deep_moe.get_symm_buffer_for_mega_moe(
            dist.group.WORLD,
            shape.num_experts,
            shape.num_max_tokens_per_rank,
            shape.num_topk,
            shape.hidden,
            shape.intermediate_hidden,
        )
        self.weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2)
        self.stats = torch.zeros(
            shape.num_experts_per_rank, dtype=torch.int32, device=self.buffer.device
        )

    def fill(self, tokens: Tokens) -> None:
        fill_inputs(self.buffer, tokens)
        self.y = torch.full(
            (tokens.num_tokens, self.shape.hidden),
            torch.nan,
            dtype=torch.bfloat16,
            device=self.buffer.device,
        )

    def __call__(self, clamp: float | None, stats: torch.Tensor | None = None) -> None:
        deep_moe.fp8_fp4_mega_moe(
            self.y,
            *self.weights,
            self.buffer,
            stats,
            activation_clamp=clamp,
            overrides=self.overrides,
        )

    def checked_call(self, tokens: Tokens, arguments: argparse.Namespace) -> dict[str, Any]:
        """Call once and compare; the kernel's config and how near it came."""
        self.stats.zero_()
        started = time.perf_counter()
        self(arguments.clamp, self.stats)
        torch.cuda.synchronize()
        first_call_s = time.perf_counter() - started
        self.buffer.raise_if_failed()

        shape, device = self.shape, self.buffer.device
        sent = torch.bincount(tokens.topk_idx.flatten(), minlength=shape.num_experts)
        dist.all_reduce(sent)
        own = sent.view(shape.num_ranks, -1)[self.buffer.rank]
        if not torch.equal(own.int(), self.stats):
            raise RuntimeError(f"experts received {self.stats.tolist()}, not {own.tolist()}")
        if bool(self.y.isnan().any()):
            raise RuntimeError("the result holds NaN")
        count = min(arguments.checked_tokens, tokens.num_tokens)
        rows = torch.linspace(0, tokens.num_tokens - 1, count, device=device).long()
        numerics = NUMERICS[weight_arch(device)]
        expected = reference_sample(shape, tokens, rows, arguments.seed, numerics, arguments.clamp)
        comparison = compare(self.y[rows], expected)
        if not comparison.is_good(exact=False, sum_bits=numerics.sum_bits):
            raise RuntimeError(f"the result differs from the reference: {comparison}")
        config = choose_config(
            shape,
            tokens.num_tokens,
            arch=weight_arch(device),
            num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
            activation_clamp=arguments.clamp,
            overrides=self.overrides,
        )
        names = ("block_m", "num_stages", "num_experts_per_wave")
        return {
            "config": {name: getattr(config, name) for name in names},
            "first_call_s": first_call_s,
            "checked_tokens": count,
            "cosine_distance": comparison.cosine_distance,
        }

    def received_by_all(self) -> torch.Tensor:
        """Tokens that every expert of every rank received in the checked call."""
        received = [torch.empty_like(self.stats) for _ in range(self.shape.num_ranks)]
        dist.all_gather(received, self.stats)
        return torch.cat(received).cpu()


def measured(
    call: Callable[[], Any], arguments: argparse.Namespace, costs: CallCosts
) -> dict[str, Any]:
    """Times of a call, and what they mean."""
    times, host_us = timed(call, arguments.warmup, arguments.calls)
    medians = [statistics.median(calls) for calls in times]
    seconds = max(medians)
    return {
        "us": 1e6 * seconds,
        "us_of_ranks": [1e6 * median for median in medians],
        "us_fastest_call": 1e6 * min(map(max, zip(*times, strict=True))),
        "us_slowest_call": 1e6 * max(map(max, times)),
        "host_us": host_us,
        "tflops": costs.flops / seconds / 1e12,
        "weight_tb_per_s": costs.weight_bytes / seconds / 1e12,
        "floor_us": 1e6 * costs.floor_s(MachineRates()),
        "floor_share": costs.floor_s(MachineRates()) / seconds,
    }


def timed(
    call: Callable[[], Any], num_warmup: int, num_calls: int
) -> tuple[list[list[float]], float]:
    """Seconds on the GPU of each rank's calls, and microseconds that this host took for one."""
    token = torch.zeros(1, device="cuda")
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(num_warmup + num_calls)]
        for _ in range(2)
    )
    host_s = []
    for start, end in zip(starts, ends, strict=True):
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(token)
        start.record()
        before = time.perf_counter()
        call()
        host_s.append(time.perf_counter() - before)
        end.record()
    torch.cuda.synchronize()
    own = [1e-3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    mine = torch.tensor(own[num_warmup:], dtype=torch.float64, device="cuda")
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    return [rank.tolist() for rank in ranks], 1e6 * statistics.median(host_s[num_warmup:])


def trace_path(path: Path, model: str, num_tokens: int) -> Path:
    """
    >>> trace_path(Path("out/layer.json.gz"), "deepseek-v4-pro", 8).as_posix()
    'out/layer-deepseek-v4-pro-8.json.gz'
    """
    name, dot, endings = path.name.partition(".")
    return path.with_name(f"{name}-{model}-{num_tokens}{dot}{endings}")


def traced(fused: FusedLayer, arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Where the time of a call goes, on all ranks; the first of them writes the trace."""
    with trace.record(fused.buffer) as (recorder,):
        timed(partial(fused, arguments.clamp), arguments.warmup, 1)
        own = recorder.collect()
    gathered: list[trace.RankTrace] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    ranks = trace.aligned(gathered)
    if dist.get_rank() == 0:
        trace.write_chrome_trace(ranks, path)
    return trace.breakdown(ranks)


def line(result: dict[str, Any]) -> str:
    """A result for people."""
    text = (
        f"{result['model']:18s} {result['tokens_per_rank']:5d} tokens/rank  "
        f"{result['us']:8.1f} us  {result['tflops']:6.0f} TFLOPS  "
        f"{result['weight_tb_per_s']:5.2f} TB/s  {result['floor_share']:4.0%} of floor  "
        f"block_m {result['config']['block_m']}"
    )
    for name in ("unfused", "peer"):
        if name in result:
            other = result[name]
            text += f"  {name} {other['us']:.1f} us ({other['times_slower']:.2f}x)"
    return text


def machine(commit: str | None) -> dict[str, Any]:
    """What the numbers were measured on and with."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": torch.cuda.get_device_name(),
        "num_sms": properties.multi_processor_count,
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "deep_moe": deep_moe.__version__,
        "commit": commit or first_line("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def first_line(*command: str) -> str | None:
    """Of a program's output; None without the program, or if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return None
    lines = result.stdout.splitlines()
    return lines[0].strip() if result.returncode == 0 and lines else None


if __name__ == "__main__":
    sys.exit(main())
