"""Times a layer over several domains, on GPUs of one machine that are taken for domains, beside the
fused call on all of them.

    python -m benchmarks.two_level --json two_level.json                # 2 domains of 1 GPU each
    python -m benchmarks.two_level --ranks 4 --tokens 128               # 2 domains of 2

Both begin with BF16 tokens and a router's output. Between the domains NCCL goes over NVLink, so
what a network between machines would take is not in these times; what is in them are the calls
inside the domains, which have other ranks' tokens in their own batch, NCCL's start, and PyTorch's
kernels around both.

A time is the median of --calls calls, of the slowest rank, as in benchmarks/all_to_all.py.
`graph_us` is of a replayed CUDA graph, which fixed sizes allow. Calls say how many tokens ranks
have (`most_tokens`), so that fixed sizes are those of the call and not of the layer's room for the
largest; --whole-room leaves that out. With --profile FOLDER, on GPUs, rank 0 also records calls
with PyTorch's profiler: a Chrome trace of each path, and in the report the microseconds of each
kernel in a call, the largest first. The fused call is checked against
the reference, the others against it, for each number of tokens. On a CPU it all runs in the
emulator, and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_moe import DomainGroups, TwoLevelMoE, make_domain_groups, prepare_inputs
from deep_moe.activations import Swiglu
from deep_moe.cli.layer_options import LayerOptions
from deep_moe.heuristics import PRESETS, MoEShape
from deep_moe.targets import target_of_device
from deep_moe.tokens import TOKEN_FORMATS
from deep_moe.trial.calls import model_inputs
from deep_moe.trial.comparison import cosine_distance
from deep_moe.trial.real_size import rank_tokens
from deep_moe.trial.synthetic import Tokens
from deep_moe.trial.timing import TimedLayer, machine, timed
from deep_moe.weights import DEFAULT_WEIGHTS, WEIGHTS

from .mega_moe import SIZES, run_on_gpus
from .problem import checked_sample, rank_weights

TOKENS = (1, 8, 128, 1024, 4096)
MODES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "exact": {"exact_sizes": True},
    "fixed, 2 chunks": {"num_chunks": 2},
    "exact, 4 chunks": {"num_chunks": 4, "exact_sizes": True},
}
MAX_DISTANCE = 1e-4  # cosine, from the fused call: partial sums are rounded once more


def main() -> None:
    arguments = parse_arguments()
    run_on_gpus(run_rank, arguments.ranks or torch.cuda.device_count(), arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="deepseek-v4-pro")
    for option, field in SIZES.items():
        parser.add_argument(f"--{option}", type=int, help=f"{field}, instead of the model's")
    parser.add_argument("--weights", choices=WEIGHTS, default=DEFAULT_WEIGHTS)
    parser.add_argument("--token-format", choices=TOKEN_FORMATS, help="default: the weights' own")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="per rank")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--domains", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--transport-sms", type=int, default=32, help="that chunks leave to NCCL")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="calls before those")
    parser.add_argument("--clamp", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checked-tokens", type=int, default=8, help="compared, on each rank")
    parser.add_argument(
        "--whole-room", action="store_true", help="fixed sizes are those of the layer"
    )
    parser.add_argument("--profile", type=Path, help="folder for PyTorch's traces of rank 0")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    if min(arguments.calls, arguments.domains, *arguments.tokens) < 1:
        parser.error("--tokens, --calls and --domains must be at least 1")
    return arguments


class TwoLevelCall:
    """One rank's call in one mode, again and again on the same tokens."""

    def __init__(
        self,
        shape: MoEShape,
        fused: TimedLayer,
        activation: Swiglu,
        groups: DomainGroups,
        num_transport_sms: int,
        mode: dict[str, Any],
        whole_room: bool,
        device: torch.device,
    ) -> None:
        self._whole_room = whole_room
        self.layer = TwoLevelMoE(
            groups.domain,
            groups.cross,
            shape.num_experts,
            shape.num_max_tokens_per_rank,
            shape.num_topk,
            shape.hidden,
            shape.intermediate_hidden,
            weights=shape.weights,
            token_format=shape.token_format,
            num_transport_sms=num_transport_sms,
            device=device,
            **mode,
        )
        self._weights = fused.weights
        self._activation = activation
        self.inputs: tuple[torch.Tensor, ...] = ()
        self.y = torch.empty(0)

    def fill(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self.inputs = inputs
        self.y = torch.empty_like(inputs[0])

    def __call__(self) -> None:
        x, topk_idx, topk_weights = self.inputs
        self.layer.call(
            *(x, topk_idx, topk_weights, self._weights),
            out=self.y,
            most_tokens=None if self._whole_room else x.shape[0],  # all ranks have as many here
            activation=self._activation,
        )

    def captured(self) -> Callable[[], None]:
        """A replay of the call, which has been made before."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own thread looks at its events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self()
        return graph.replay


def run_rank(device: torch.device, arguments: argparse.Namespace) -> None:
    """One process: all sizes."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    options = LayerOptions(
        model=arguments.model,
        weights=arguments.weights,
        token_format=arguments.token_format,
        activation="swiglu",
        **{option: getattr(arguments, option) for option in SIZES},
    )
    most = max(arguments.tokens)
    shape = options.shape(num_ranks, most, arch=target_of_device(device).name, is_fused=False)
    activation = Swiglu(arguments.clamp)
    fused = TimedLayer(shape, rank_weights(shape, rank, arguments.seed, device), device)
    groups = make_domain_groups(arguments.domains, num_transport_sms=arguments.transport_sms)
    calls = {
        name: TwoLevelCall(
            shape,
            fused,
            activation,
            groups,
            arguments.transport_sms,
            MODES[name],
            arguments.whole_room,
            device,
        )
        for name in arguments.modes
    }
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "num_domains": arguments.domains,
        "num_ranks": num_ranks,
        "bytes": {name: call.layer.nbytes for name, call in calls.items()},
        "fused_bytes": fused.buffer.nbytes,
        "results": [],
    }
    for num_tokens in arguments.tokens:
        tokens = rank_tokens(shape, num_tokens, rank, arguments.seed, device, routing="uniform")
        result = result_of(shape, fused, calls, tokens, activation, arguments, device)
        report["results"].append(result)
        if rank == 0:
            print(line(result), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for call in calls.values():
        call.layer.check()
    dist.barrier()
    for call in calls.values():
        call.layer.close()
    fused.close()


def result_of(
    shape: MoEShape,
    fused: TimedLayer,
    calls: dict[str, TwoLevelCall],
    tokens: Tokens,
    activation: Swiglu,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """All paths on the same tokens."""
    x, tokens = model_inputs(tokens)
    inputs = (x, tokens.topk_idx, tokens.topk_weights)
    fused.fill(tokens)
    fused(activation)
    checked_sample(shape, tokens, fused.y, arguments.checked_tokens, arguments.seed, activation)

    def fused_call() -> None:
        prepare_inputs(*inputs, fused.buffer)
        fused(activation)

    def timed_and_profiled(name: str, call: Callable[[], None]) -> dict[str, Any]:
        of_path = timed_path(call, arguments, device)
        if arguments.profile is not None and device.type == "cuda":
            file = f"{name.replace(', ', '-').replace(' ', '-')}-{tokens.num_tokens}.json"
            of_path["kernels_us"] = profiled(call, arguments.profile / file)
        return of_path

    result: dict[str, Any] = {
        "tokens_per_rank": tokens.num_tokens,
        "fused": timed_and_profiled("fused", fused_call),
        "two_level": {},
    }
    for name, call in calls.items():
        call.fill(inputs)
        call()
        call.layer.check()
        distance = cosine_distance(call.y.double().flatten(), fused.y.double().flatten())
        if not distance < MAX_DISTANCE:
            raise RuntimeError(f"{name}: {distance} from the fused call, at most {MAX_DISTANCE}")
        of_path = timed_and_profiled(name, call) | {"distance_from_fused": distance}
        if device.type == "cuda" and not call.layer.shape.exact_sizes:
            of_path["graph_us"] = timed_path(call.captured(), arguments, device)["us"]
        result["two_level"][name] = of_path
    return result


def timed_path(
    call: Callable[[], None], arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """The slowest rank's median in microseconds, and what the host took for a call."""
    of_ranks, host_us = timed(call, arguments.warmup, arguments.calls, device)
    return {"us": 1e6 * max(map(statistics.median, of_ranks)), "host_us": host_us}


def profiled(call: Callable[[], None], path: Path) -> dict[str, float]:
    """Microseconds of each kernel in one call of rank 0, the largest first; its trace goes to a
    file. All ranks must call this."""
    num_calls = 3
    if dist.get_rank() != 0:
        for _ in range(num_calls):
            call()
        return {}
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        for _ in range(num_calls):
            call()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    found: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took_us = event.time_range.elapsed_us() / num_calls
            found[event.name] = found.get(event.name, 0.0) + took_us
    return dict(sorted(found.items(), key=lambda pair: -pair[1])[:40])


def line(result: dict[str, Any]) -> str:
    """
    >>> path = {"us": 100.0, "host_us": 5.0}
    >>> print(line({"tokens_per_rank": 8, "fused": path, "two_level": {"fixed": path}}))
    8 tokens/rank: fused 100.0 us | fixed 100.0 us
    """
    paths = {"fused": result["fused"], **result["two_level"]}
    words = [
        f"{name} {path['us']:.1f} us"
        + (f", in a graph {path['graph_us']:.1f}" if "graph_us" in path else "")
        for name, path in paths.items()
    ]
    return f"{result['tokens_per_rank']} tokens/rank: " + " | ".join(words)


if __name__ == "__main__":
    main()
