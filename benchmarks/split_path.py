"""Times the split path, dispatch, grouped experts and combine, beside the fused call on the same
tokens and weights, on all GPUs of a machine, a process for each: the low-latency one, or the one
for many tokens, which is timed beside the layer of benchmarks/unfused.py too.

    python -m benchmarks.split_path --tokens 1 8 32 128 --json split_path.json
    python -m benchmarks.split_path --path throughput --tokens 2048 4096 8192 --clamp 10

For every number of tokens the outputs are compared first. Then each step, the three of them
together and the other layers are timed in turn, as all_to_all.py says it: a time is the median of
--calls calls, of the slowest rank. `in_a_row_us` is of the path, and of the fused call, in a CUDA
graph of --pairs of them without anything in between; it needs GPUs. The split path begins with BF16
tokens, which dispatch quantizes; the fused call and the unfused layer find them quantized. The
throughput path has room for as many rows as these tokens need (`max_recv_rows` in the report).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.activations import Swiglu
from deep_moe.heuristics import PRESETS, MoEShape, preset_shape, throughput
from deep_moe.heuristics.low_latency import MAX_TOKENS_PER_RANK
from deep_moe.heuristics.presets import preset_has_biases
from deep_moe.split.grouped_experts import GroupedExperts
from deep_moe.split.handle import Dispatched
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.split.throughput_moe import ThroughputMoE
from deep_moe.tokens import TOKEN_FORMATS
from deep_moe.trial.calls import bias_arguments, model_inputs
from deep_moe.trial.comparison import compare
from deep_moe.trial.real_size import rank_tokens
from deep_moe.trial.split_calls import max_received_rows
from deep_moe.trial.synthetic import Tokens
from deep_moe.trial.timing import TimedLayer, machine

from .all_to_all import in_a_row_us, timed_steps
from .mega_moe import MAX_PATH_DISTANCE, run_on_gpus
from .problem import rank_weights
from .unfused import UnfusedLayer

TOKENS = {"low-latency": (1, 8, 32, 128), "throughput": (2048, 4096, 8192)}
MOST_TOKENS = {
    "low-latency": MAX_TOKENS_PER_RANK,
    "throughput": throughput.MAX_TOKENS_PER_RANK,
}
SIZES = {
    "experts": "num_experts",
    "topk": "num_topk",
    "hidden": "hidden",
    "intermediate": "intermediate_hidden",
}


def main() -> None:
    arguments = parse_arguments()
    run_on_gpus(run_rank, arguments.ranks or torch.cuda.device_count(), arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="deepseek-v3")
    parser.add_argument("--path", choices=sorted(TOKENS), default="low-latency")
    parser.add_argument("--tokens", nargs="+", type=int, help="per rank; default: by the path")
    for option, field in SIZES.items():
        parser.add_argument(f"--{option}", type=int, help=f"{field}; default: the model's")
    parser.add_argument("--weights", choices=["mxfp4", "fp8", "bf16"], default="mxfp4")
    parser.add_argument("--token-format", choices=TOKEN_FORMATS)
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--sms", type=int, help="CTAs of a kernel; default: all SMs")
    parser.add_argument("--calls", type=int, default=40, help="of each step, at least")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=5, help="calls before those of a round")
    parser.add_argument("--pairs", type=int, default=20, help="in a CUDA graph")
    parser.add_argument(
        "--zero-copy",
        action="store_true",
        help="experts write where ranks fetch, as they always do on the throughput path",
    )
    parser.add_argument("--clamp", type=float, help="of SwiGLU; default: none")
    parser.add_argument(
        "--without-unfused", action="store_true", help="do not time the layer of unfused.py"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    arguments.tokens = arguments.tokens or list(TOKENS[arguments.path])
    if min(arguments.calls, arguments.rounds, arguments.pairs, *arguments.tokens) < 1:
        parser.error("--tokens, --calls, --rounds and --pairs must be at least 1")
    most = MOST_TOKENS[arguments.path]
    if max(arguments.tokens) > most:
        parser.error(f"--tokens must be at most {most}, of a {arguments.path} dispatch")
    if arguments.path == "throughput":
        if arguments.zero_copy:
            parser.error("--zero-copy is for --path low-latency; the throughput path never copies")
        if preset_has_biases(arguments.model) and not arguments.without_unfused:
            parser.error(
                f"--without-unfused is needed for {arguments.model}: unfused.py has no biases"
            )
    return arguments


def shape_of(arguments: argparse.Namespace, num_ranks: int) -> MoEShape:
    """The model's, with sizes that were given instead."""
    most = max(arguments.tokens)
    model = preset_shape(arguments.model, num_ranks=num_ranks, num_max_tokens_per_rank=most)
    sizes = {
        field: getattr(model, field) if given is None else given
        for option, field in SIZES.items()
        for given in [getattr(arguments, option)]
    }
    return MoEShape(
        num_ranks=num_ranks,
        num_max_tokens_per_rank=most,
        weights=arguments.weights,
        token_format=arguments.token_format,
        biases=model.biases,
        **sizes,
    )


class LowLatencyLayer:
    """One rank's dispatch, experts and combine, with the weights of a fused layer."""

    def __init__(self, fused: TimedLayer, arguments: argparse.Namespace) -> None:
        shape, device = fused.shape, fused.buffer.device
        self.fused = fused
        self.zero_copy = arguments.zero_copy
        self.all_to_all = LowLatencyAllToAll(
            dist.group.WORLD,
            shape.num_max_tokens_per_rank,
            shape.hidden,
            shape.num_experts,
            shape.num_topk,
            token_format=shape.token_format,
            zero_copy=arguments.zero_copy,
            device=device,
            num_sms=arguments.sms,
        )
        self.experts = GroupedExperts(
            max_received_rows(shape),
            shape.hidden,
            shape.intermediate_hidden,
            shape.num_experts_per_rank,
            weights=shape.weights,
            biases=shape.biases,
            token_format=shape.token_format,
            activation_clamp=arguments.clamp,
            device=device,
            num_sms=arguments.sms,
        )
        size = (
            shape.num_experts_per_rank,
            shape.num_ranks * shape.num_max_tokens_per_rank,
            shape.hidden,
        )
        self.rows = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.y = self.x = torch.empty(0)
        self.dispatched: Dispatched | None = None

    def fill(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.x = model_inputs(tokens)[0]
        self.y = torch.empty_like(self.x)

    def dispatch(self) -> None:
        self.dispatched = self.all_to_all.dispatch(self.x, self.tokens.topk_idx)

    def compute(self) -> None:
        result = self.dispatched
        assert result is not None
        if self.zero_copy:
            self.rows = self.all_to_all.get_combine_buffer(result.handle)
        biases = bias_arguments(self.fused.biases)
        weights, count = self.fused.weights, result.recv_count
        self.experts(result.recv_x, result.scales, weights, count, out=self.rows, **biases)

    def combine(self) -> None:
        assert self.dispatched is not None
        self.all_to_all.combine(
            self.rows,
            self.tokens.topk_idx,
            self.tokens.topk_weights,
            self.dispatched.handle,
            self.y,
            zero_copy=self.zero_copy,
        )

    def __call__(self) -> None:
        self.dispatch()
        self.compute()
        self.combine()

    def close(self) -> None:
        """Behind `TimedLayer.close`, for which all ranks meet."""
        self.all_to_all.check()
        self.experts.check()
        self.all_to_all.close()
        self.experts.close()


class ThroughputLayer:
    """The same of the path for many tokens."""

    def __init__(
        self, fused: TimedLayer, arguments: argparse.Namespace, max_recv_rows: int
    ) -> None:
        shape = fused.shape
        self.fused = fused
        self.layer = ThroughputMoE(
            dist.group.WORLD,
            shape.num_max_tokens_per_rank,
            shape.hidden,
            shape.intermediate_hidden,
            shape.num_experts,
            shape.num_topk,
            max_recv_rows=max_recv_rows,
            weights=shape.weights,
            biases=shape.biases,
            token_format=shape.token_format,
            activation_clamp=arguments.clamp,
            device=fused.buffer.device,
            num_sms=arguments.sms,
        )
        self.experts = self.layer.experts
        self.y = self.x = self.rows = torch.empty(0)

    def fill(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.x = model_inputs(tokens)[0]
        self.y = torch.empty_like(self.x)

    def dispatch(self) -> None:
        self.received, self.handle = self.layer.dispatch(self.x, self.tokens.topk_idx)

    def compute(self) -> None:
        biases = bias_arguments(self.fused.biases)
        self.rows = self.layer.compute(self.received, self.fused.weights, **biases)

    def combine(self) -> None:
        self.layer.combine(self.rows, self.handle, self.tokens.topk_weights, out=self.y)

    def __call__(self) -> None:
        self.dispatch()
        self.compute()
        self.combine()

    def close(self) -> None:
        """Behind `TimedLayer.close`, for which all ranks meet."""
        self.layer.check()
        self.layer.close()


def needed_rows(shape: MoEShape, calls: Sequence[Tokens]) -> int:
    """Most rows that the experts of a rank get in one of these calls of all ranks."""
    most = 1
    for tokens in calls:
        named = torch.bincount(tokens.topk_idx.flatten(), minlength=shape.num_experts)
        dist.all_reduce(named)
        most = max(most, int(named.view(shape.num_ranks, -1).sum(1).max()))
    return most


def run_rank(device: torch.device, arguments: argparse.Namespace) -> None:
    """One process: all sizes."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = shape_of(arguments, num_ranks)
    weights = rank_weights(shape, rank, arguments.seed, device)
    fused = TimedLayer(shape, weights, device)
    calls = [
        rank_tokens(shape, num_tokens, rank, arguments.seed, device)
        for num_tokens in arguments.tokens
    ]
    split: LowLatencyLayer | ThroughputLayer
    unfused: UnfusedLayer | None = None
    if arguments.path == "throughput":
        max_recv_rows = needed_rows(shape, calls)
        split = ThroughputLayer(fused, arguments, max_recv_rows)
        if not arguments.without_unfused:
            unfused = UnfusedLayer(shape, weights, dist.group.WORLD)
    else:
        max_recv_rows = max_received_rows(shape)
        split = LowLatencyLayer(fused, arguments)
    del weights
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "num_ranks": num_ranks,
        "max_recv_rows": max_recv_rows,
        "work_space_bytes": split.experts.nbytes,
        "results": [],
    }
    for tokens in calls:
        report["results"].append(result_of(split, unfused, tokens, arguments, device))
        if rank == 0:
            print(line(report["results"][-1]), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    fused.close()
    split.close()


def result_of(
    split: LowLatencyLayer | ThroughputLayer,
    unfused: UnfusedLayer | None,
    tokens: Tokens,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    fused = split.fused
    activation = Swiglu() if arguments.clamp is None else Swiglu(arguments.clamp)
    quantized = model_inputs(tokens)[1]
    fused.fill(quantized)
    split.fill(tokens)
    # Twice, with a wait in between, so that each call knows how much the one before received.
    overrides = {} if arguments.sms is None else {"num_sms": arguments.sms}

    def call_fused() -> None:
        fused(activation, overrides)

    for _ in range(2):
        split()
        call_fused()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    steps: dict[str, Callable[[], Any]] = {
        "dispatch": split.dispatch,
        "experts": split.compute,
        "combine": split.combine,
        "path": split,
        "fused": call_fused,
    }
    outputs = {"the split path": split.y}
    if unfused is not None:
        inputs = *unfused.prepare(quantized), tokens.topk_idx, tokens.topk_weights
        steps["unfused"] = partial(unfused, *inputs, activation)
        outputs["the unfused layer"] = steps["unfused"]()
    distances = {name: compare(output, fused.y).cosine_distance for name, output in outputs.items()}
    for name, distance in distances.items():
        if not distance < MAX_PATH_DISTANCE:
            raise RuntimeError(f"{name} is {distance} away from the fused call, as an angle")
    result: dict[str, Any] = {
        "tokens_per_rank": tokens.num_tokens,
        "cosine_distance": distances["the split path"],
        **timed_steps(steps, arguments, device),
    }
    result["times_slower"] = result["path"]["us"] / result["fused"]["us"]
    if unfused is not None:
        result["times_faster_than_unfused"] = result["unfused"]["us"] / result["path"]["us"]
    if device.type == "cuda":
        for name, step in (("path", split), ("fused", call_fused)):
            result[name]["in_a_row_us"] = in_a_row_us((step,), arguments, device)
    return result


def line(result: dict[str, Any]) -> str:
    """A result for people."""
    words = [f"{result['tokens_per_rank']:5d} tokens/rank"]
    words += [
        f"{name} {result[name]['us']:.1f} us ({result[name]['us_p10']:.1f} to "
        f"{result[name]['us_p90']:.1f})"
        for name in ("dispatch", "experts", "combine", "path", "fused", "unfused")
        if name in result
    ]
    words.append(f"{result['times_slower']:.2f} times the fused call")
    if "unfused" in result:
        words.append(f"the unfused layer {result['times_faster_than_unfused']:.2f} times the path")
    if "in_a_row_us" in result["path"]:
        in_a_row = [f"{result[name]['in_a_row_us']:.1f}" for name in ("path", "fused")]
        words.append(f"in a row {' and '.join(in_a_row)} us")
    return "  ".join(words)


if __name__ == "__main__":
    main()
