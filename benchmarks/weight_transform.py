"""Times the transformation of weights, which a server does once per layer, and prints JSON.

    python -m benchmarks.weight_transform                    # on the GPU if there is one
    python -m benchmarks.weight_transform --device cpu --repeats 3

By default 8 experts of deepseek-v4-pro. Targets take turns, round by round, so that what slows the
machine for a while slows all of them; the best and the median round of each are reported.
`seconds` is the whole layer into new tensors, `seconds_by_expert` one expert after the other into
`out`, as a loader does it. `cpu_seconds` is what the process's threads worked for the former.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import deep_moe
from deep_moe.targets import TARGETS
from deep_moe.weights.layers import ExpertWeights, LayerWeights


def main(argv: Sequence[str] | None = None) -> None:
    print(json.dumps(measure(parse_arguments(argv)), indent=1))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    weights = random_weights(arguments.experts, arguments.hidden, arguments.intermediate, device)
    num_bytes = sum(tensor.nbytes for layer in weights for tensor in layer)
    rounds: dict[str, list[dict[str, float]]] = {arch: [] for arch in TARGETS}
    for i in range(arguments.repeats + 1):
        for arch in TARGETS:
            times = one_round(weights, arch, device)
            if i > 0:  # the first one warms up
                rounds[arch].append(times)
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.processor(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "experts": arguments.experts,
        "hidden": arguments.hidden,
        "intermediate": arguments.intermediate,
        "bytes": num_bytes,
        "targets": {arch: summary(rounds[arch], num_bytes) for arch in TARGETS},
    }


def random_weights(
    num_experts: int, hidden: int, intermediate: int, device: torch.device
) -> ExpertWeights:
    def layer(num_rows: int, num_columns: int) -> LayerWeights:
        shape = (num_experts, num_rows, num_columns // 2)
        weight = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        # Scales of normally distributed weights lie within a few powers of two.
        shape = (num_experts, num_rows, num_columns // 32)
        sf = torch.randint(117, 121, shape, dtype=torch.uint8, device=device)
        return LayerWeights(weight, sf.view(torch.int32))

    return ExpertWeights(layer(2 * intermediate, hidden), layer(hidden, intermediate))


def one_round(weights: ExpertWeights, arch: str, device: torch.device) -> dict[str, float]:
    cpu_start = time.process_time()
    start = time.perf_counter()
    out = deep_moe.transform_weights_for_mega_moe(weights.l1, weights.l2, arch)
    finish(device)
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    start = time.perf_counter()
    for expert_idx in range(weights.l1.weight.shape[0]):
        own = weights.expert(expert_idx)
        deep_moe.transform_weights_for_mega_moe(own.l1, own.l2, arch, out=out.expert(expert_idx))
    finish(device)
    by_expert = time.perf_counter() - start
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "seconds_by_expert": by_expert}


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(rounds: Sequence[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    best = {name: min(times[name] for times in rounds) for name in rounds[0]}
    median = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    return {"best": best, "median": median, "gb_per_s": num_bytes / best["seconds"] / 1e9}


if __name__ == "__main__":
    main()
