"""Times the split path, low-latency dispatch, grouped experts and combine, beside the fused call
on the same tokens and weights, on all GPUs of a machine, a process for each.

    python -m benchmarks.split_path --tokens 1 8 32 128 --json split_path.json
    python -m benchmarks.split_path --ranks 1 --model deepseek-v4-flash

For every number of tokens the two outputs are compared first. Then each step, the three of them
together and the fused call are timed in turn, as all_to_all.py says it: a time is the median of
--calls calls, of the slowest rank. `in_a_row_us` is of the path, and of the fused call, in a CUDA
graph of --pairs of them without anything in between; it needs GPUs. The split path begins with BF16
tokens, which dispatch quantizes; the fused call finds them quantized.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.activations import Swiglu
from deep_moe.formats.weight_formats import DEFAULT_TOKEN_SCALES, TOKEN_SCALES
from deep_moe.heuristics import PRESETS, MoEShape, preset_shape
from deep_moe.heuristics.low_latency import MAX_TOKENS_PER_RANK
from deep_moe.split.grouped_experts import GroupedExperts, format_of_tokens
from deep_moe.split.handle import Dispatched
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.trial.calls import model_inputs
from deep_moe.trial.comparison import compare
from deep_moe.trial.rank_processes import run_in_group
from deep_moe.trial.real_size import rank_tokens
from deep_moe.trial.split_calls import max_received_rows
from deep_moe.trial.synthetic import Tokens
from deep_moe.trial.timing import TimedLayer, machine

from .all_to_all import in_a_row_us, timed_steps
from .mega_moe import MAX_PATH_DISTANCE, run_on_gpus
from .problem import rank_weights

TOKENS = (1, 8, 32, 128)
SIZES = {
    "experts": "num_experts",
    "topk": "num_topk",
    "hidden": "hidden",
    "intermediate": "intermediate_hidden",
}


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:  # torchrun has made the processes
        run_in_group(run_rank, torch.device("cuda", int(os.environ["LOCAL_RANK"])), (arguments,))
        return
    run_on_gpus(run_rank, arguments.ranks or torch.cuda.device_count(), arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="deepseek-v3")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="per rank")
    for option, field in SIZES.items():
        parser.add_argument(f"--{option}", type=int, help=f"{field}; default: the model's")
    parser.add_argument("--weights", choices=["mxfp4", "fp8", "bf16"], default="mxfp4")
    parser.add_argument("--token-scales", choices=TOKEN_SCALES, default=DEFAULT_TOKEN_SCALES)
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--sms", type=int, help="CTAs of a kernel; default: all SMs")
    parser.add_argument("--calls", type=int, default=40, help="of each step, at least")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=5, help="calls before those of a round")
    parser.add_argument("--pairs", type=int, default=20, help="in a CUDA graph")
    parser.add_argument("--zero-copy", action="store_true", help="experts write where ranks fetch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    if min(arguments.calls, arguments.rounds, arguments.pairs, *arguments.tokens) < 1:
        parser.error("--tokens, --calls, --rounds and --pairs must be at least 1")
    if max(arguments.tokens) > MAX_TOKENS_PER_RANK:
        parser.error(f"--tokens must be at most {MAX_TOKENS_PER_RANK}, of a low-latency dispatch")
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
        token_scales=arguments.token_scales,
        biases=model.biases,
        **sizes,
    )


class SplitLayer:
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
            format=format_of_tokens(shape.weights, shape.token_scales),
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
            format=format_of_tokens(shape.weights, shape.token_scales),
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
        biases: dict[str, Any] = {}
        if self.fused.biases is not None:
            biases = {"l1_bias": self.fused.biases.l1, "l2_bias": self.fused.biases.l2}
        l1, l2 = self.fused.weights
        self.experts(
            result.recv_x, result.scales, l1, l2, result.recv_count, out=self.rows, **biases
        )

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


def run_rank(device: torch.device, arguments: argparse.Namespace) -> None:
    """One process: all sizes."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = shape_of(arguments, num_ranks)
    weights = rank_weights(shape, rank, arguments.seed, device)
    fused = TimedLayer(shape, weights, device)
    split = SplitLayer(fused, arguments)
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "num_ranks": num_ranks,
        "work_space_bytes": split.experts.nbytes,
        "results": [],
    }
    for num_tokens in arguments.tokens:
        tokens = rank_tokens(shape, num_tokens, rank, arguments.seed, device)
        report["results"].append(result_of(split, tokens, arguments, device))
        if rank == 0:
            print(line(report["results"][-1]), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    fused.close()
    split.close()


def result_of(
    split: SplitLayer, tokens: Tokens, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    fused = split.fused
    fused.fill(model_inputs(tokens)[1])
    split.fill(tokens)
    # Twice, with a wait in between, so that each call knows how much the one before received.
    overrides = {} if arguments.sms is None else {"num_sms": arguments.sms}

    def call_fused() -> None:
        fused(Swiglu(), overrides)

    for _ in range(2):
        split()
        call_fused()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    distance = compare(split.y, fused.y).cosine_distance
    if not distance < MAX_PATH_DISTANCE:
        raise RuntimeError(f"the split path is {distance} away from the fused call, as an angle")
    steps: dict[str, Callable[[], None]] = {
        "dispatch": split.dispatch,
        "experts": split.compute,
        "combine": split.combine,
        "path": split,
        "fused": call_fused,
    }
    result: dict[str, Any] = {
        "tokens_per_rank": tokens.num_tokens,
        "cosine_distance": distance,
        **timed_steps(steps, arguments, device),
    }
    result["times_slower"] = result["path"]["us"] / result["fused"]["us"]
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
        for name in ("dispatch", "experts", "combine", "path", "fused")
    ]
    words.append(f"{result['times_slower']:.2f} times the fused call")
    if "in_a_row_us" in result["path"]:
        in_a_row = [f"{result[name]['in_a_row_us']:.1f}" for name in ("path", "fused")]
        words.append(f"in a row {' and '.join(in_a_row)} us")
    return "  ".join(words)


if __name__ == "__main__":
    sys.exit(main())
