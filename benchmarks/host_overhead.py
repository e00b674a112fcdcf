"""Times the host's part of a warm call: from the Python call until the kernel is enqueued.

    python -m benchmarks.host_overhead --json host.json
    python -m benchmarks.host_overhead --without-gpu      # Python's part, on any machine

One rank, small layers that take turns. Each call is timed by itself, in batches that begin with an
idle GPU and end long before its queue is full, so that the host never waits for it: the first call
of a batch has a line of its own in the report. What is timed takes turns too, batch by batch: what
slows the machine for a while slows all of it alike, and shows in "part: yardstick", which is the
same Python work every time, and in the medians of each fifth of the run. `--without-gpu` takes
tensors on the CPU and leaves out the driver: what runs is the GPU's path, up to the launch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import deep_moe
from deep_moe.emulator.tensor_map import TensorMapSpec
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.call_plan import prepare_call
from deep_moe.fused.gpu import Gpu, gpu_of
from deep_moe.heuristics import MoEShape
from deep_moe.jit.cache import CompiledKernel
from deep_moe.targets import Target
from deep_moe.targets.sm90 import SM90A
from deep_moe.trial.synthetic import random_layer

SHAPE = MoEShape(
    num_ranks=1,
    num_experts=16,
    num_topk=4,
    hidden=1024,
    intermediate_hidden=512,
    num_max_tokens_per_rank=64,
)
GOAL_US = 20.0
NUM_WARM_UP_BATCHES = 3
YARDSTICK = range(1000)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    with ExitStack() as stack:
        if arguments.without_gpu:
            stack.enter_context(gpu_path_on_cpu(UndrivenGpu()))
        times = measure(arguments)
    for name, batches in times.items():
        print(line(name, all_calls(batches)))
    if arguments.json is not None:
        report = {
            "machine": machine(arguments.without_gpu),
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "results": {name: summary_of_batches(batches) for name, batches in times.items()},
        }
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="layers that take turns")
    parser.add_argument("--calls", type=int, default=32, help="calls of a batch")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--without-gpu", action="store_true", help="leave out the driver")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(argv)


class UndrivenLauncher:
    """Takes launches and does nothing; keeps the last."""

    def __init__(self) -> None:
        self.num_launches = 0
        self.last: tuple[Any, int, int] | None = None

    def launch(self, args: Any, num_ctas: int, stream: int) -> None:
        self.num_launches += 1
        self.last = (args, num_ctas, stream)


class UndrivenGpu(Gpu):
    """Stands for a GPU where there is none, an H200 if nothing else is said: its memory is the
    host's, and launches end here."""

    def __init__(self, target: Target = SM90A) -> None:
        super().__init__(torch.device("cpu"), "no GPU", target, target.default_num_sms)

    def load(self, kernel: CompiledKernel, **_: Any) -> Any:
        return UndrivenLauncher()

    def encode_tensor_map(self, spec: TensorMapSpec) -> bytes:
        return spec.encode_emulated()

    def current_stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False


@contextmanager
def gpu_path_on_cpu(gpu: Gpu) -> Iterator[None]:
    """Buffers that are made meanwhile, on the CPU, are taken for ones on `gpu`."""
    with (
        patch("deep_moe.fused.rank_buffer.gpu_of", lambda _: gpu),
        patch("deep_moe.fused.input_preparation.gpu_of", lambda _: gpu),
        patch("deep_moe.fused.input_preparation._plans", BoundedCache(64)),  # plans name their GPU
    ):
        yield


class Layers:
    """What is called: layers that share a buffer."""

    def __init__(self, shape: MoEShape, num_layers: int, device: torch.device) -> None:
        self.buffer = deep_moe.get_symm_buffer_for_mega_moe(
            None,
            shape.num_experts,
            shape.num_max_tokens_per_rank,
            shape.num_topk,
            shape.hidden,
            shape.intermediate_hidden,
            device=device,
        )
        self.device = self.buffer.device
        assert self.buffer.gpu is not None
        self.gpu = self.buffer.gpu
        num_tokens = shape.num_max_tokens_per_rank
        layer = random_layer(shape)
        l1, l2 = (
            (values.to(self.device), sf.to(self.device)) for values, sf in (layer.l1, layer.l2)
        )
        self.weights = [
            deep_moe.transform_weights_for_mega_moe(l1, l2, arch=self.gpu.target.name)
            for _ in range(num_layers)
        ]
        self.ys = [
            torch.empty(num_tokens, shape.hidden, dtype=torch.bfloat16, device=self.device)
            for _ in range(num_layers)
        ]
        self.shorter_ys = [y[: 1 + 7 * i % num_tokens] for i, y in enumerate(self.ys)]
        self.stats = torch.zeros(shape.num_experts, dtype=torch.int32, device=self.device)
        self.x = torch.randn(num_tokens, shape.hidden, device=self.device).bfloat16()
        experts = torch.rand(num_tokens, shape.num_experts, device=self.device)
        self.topk_weights, self.topk_idx = experts.topk(shape.num_topk, dim=1)

    def prepare_inputs(self, _: int = 0) -> None:
        deep_moe.prepare_inputs(self.x, self.topk_idx, self.topk_weights, self.buffer)

    def call(self, i: int) -> None:
        deep_moe.mega_moe(self.ys[i], self.weights[i], self.buffer)

    def call_with_options(self, i: int) -> None:
        deep_moe.mega_moe(
            self.ys[i], self.weights[i], self.buffer, self.stats, activation_clamp=10.0
        )

    def call_with_other_tokens(self, i: int) -> None:
        deep_moe.mega_moe(self.shorter_ys[i], self.weights[i], self.buffer)

    def arguments(self, i: int) -> tuple[Any, Any]:
        """The part of a call that makes the kernel's arguments."""
        l1, l2 = self.weights[i]
        return prepare_call(self.ys[i], l1, l2, self.buffer, {}, {})


# Seconds of every call, by batch.
Batches = list[list[float]]


def measure(arguments: argparse.Namespace) -> dict[str, Batches]:
    """By what was called."""
    device = torch.device("cpu" if arguments.without_gpu else "cuda")
    layers = Layers(SHAPE, arguments.layers, device)
    layers.prepare_inputs()
    plan, args = layers.arguments(0)
    calls: dict[str, Callable[[int], Any]] = {
        "mega_moe": layers.call,
        "mega_moe, statistics and clamp": layers.call_with_options,
        "mega_moe, changing tokens": layers.call_with_other_tokens,
        "prepare_inputs": layers.prepare_inputs,
        "part: arguments": layers.arguments,
        "part: current stream": lambda _: layers.gpu.current_stream(),
        "part: launch": lambda _: plan.launcher.launch(args, plan.config.num_sms, 0),
        "part: yardstick": lambda _: sum(YARDSTICK),
        "part: nothing": lambda _: None,
    }
    times: dict[str, Batches] = {name: [] for name in calls}
    for batch in range(-NUM_WARM_UP_BATCHES, arguments.batches):
        for name, call in calls.items():
            seconds = timed(call, arguments, device)
            if batch >= 0:
                times[name].append(seconds)
    if device.type == "cuda":
        torch.cuda.synchronize()
    layers.buffer.raise_if_failed()
    return times


def timed(
    call: Callable[[int], Any], arguments: argparse.Namespace, device: torch.device
) -> list[float]:
    """Seconds of each call of a batch."""
    times: list[float] = []
    if device.type == "cuda":
        torch.cuda.synchronize()
    for i in range(arguments.calls):
        layer_idx = i % arguments.layers
        before = time.perf_counter()
        call(layer_idx)
        after = time.perf_counter()
        times.append(after - before)
    return times


def all_calls(batches: Batches) -> list[float]:
    return [seconds for batch in batches for seconds in batch]


def summary_of_batches(batches: Batches) -> dict[str, Any]:
    """first_of_batch_us: median of the calls that find the GPU idle. fifths_us: medians of
    successive parts of the run."""
    fifth = -(-len(batches) // 5)
    return {
        **summary(all_calls(batches)),
        "first_of_batch_us": 1e6 * statistics.median(batch[0] for batch in batches),
        "fifths_us": [
            1e6 * statistics.median(all_calls(batches[first : first + fifth]))
            for first in range(0, len(batches), fifth)
        ],
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """In microseconds."""
    in_order = sorted(seconds)
    return {
        "median_us": 1e6 * statistics.median(in_order),
        "p90_us": 1e6 * in_order[len(in_order) * 9 // 10],
        "min_us": 1e6 * in_order[0],
    }


def line(name: str, seconds: Sequence[float]) -> str:
    """A result for people."""
    us = summary(seconds)
    goal = "" if name.startswith("part") else f"   goal: below {GOAL_US:.0f}"
    return f"{name:32s} {us['median_us']:6.1f} us   p90 {us['p90_us']:6.1f}{goal}"


def machine(without_gpu: bool) -> dict[str, Any]:
    """What the numbers were measured on and with."""
    gpu = None if without_gpu else gpu_of(torch.device("cuda", torch.cuda.current_device()))
    return {
        "gpu": None if gpu is None else gpu.name,
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deep_moe": deep_moe.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu_name() -> str | None:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((text.split(":")[1].strip() for text in lines if "model name" in text), None)


if __name__ == "__main__":
    sys.exit(main())
