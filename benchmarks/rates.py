"""The highest rates of a GPU's memory and tensor cores, by PyTorch; floors are computed from them.

    python -m benchmarks.rates
    python -m benchmarks.rates --json rates.json

`read`: a sum over 8 GiB, which reads every byte once. `fp8` and `bf16`: a product of 8192 x 8192 x
8192 by cuBLAS. Each is the median of short runs, which begin with a rest, and the mean of one long
run, in which the GPU comes to its power limit. Floors take the best of `read` and of `fp8`:
benchmarks.problem.MEASURED_RATES has them by the GPU's name, and an H200's for a GPU that it does
not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

READ_BYTES = 8 * 2**30
SIZE = 8192  # of each side of a product
SHORT_CALLS, LONG_CALLS = 3, 300
NUM_SHORT_RUNS, REST_S = 10, 0.05


@dataclass(frozen=True)
class Workload:
    """A call, and its rate in `unit` if it took a second."""

    unit: str
    amount: float
    call: Callable[[], Any]


def workloads(
    device: torch.device, read_bytes: int = READ_BYTES, size: int = SIZE
) -> dict[str, Workload]:
    """By name. The FP8 product only where there are tensor cores for it."""
    # Floats: PyTorch adds integers up in 64 bits, at 0.77 TB/s on an H200.
    values = torch.ones(read_bytes // 4, device=device)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    flop = 2.0 * size**3
    found = {
        "read": Workload("TB/s", read_bytes / 1e12, values.sum),
        "bf16": Workload("TFLOPS", flop / 1e12, lambda: a @ b),
    }
    if device.type == "cuda":
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

        def product() -> torch.Tensor:
            return torch._scaled_mm(
                a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        found["fp8"] = Workload("TFLOPS", flop / 1e12, product)
    return found


def seconds_per_call(call: Callable[[], Any], num_calls: int, device: torch.device) -> float:
    """Mean of calls one behind the other."""
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(num_calls):
        call()
    _synchronize(device)
    return (time.perf_counter() - begin) / num_calls


def measure(
    workload: Workload,
    device: torch.device,
    short_calls: int = SHORT_CALLS,
    long_calls: int = LONG_CALLS,
    rest_s: float = REST_S,
) -> dict[str, Any]:
    """Rates of short runs and of a long one."""
    workload.call()  # what is made on first use
    short = []
    for _ in range(NUM_SHORT_RUNS):
        time.sleep(rest_s)
        short.append(workload.amount / seconds_per_call(workload.call, short_calls, device))
    long = workload.amount / seconds_per_call(workload.call, long_calls, device)
    return {"unit": workload.unit, "short": statistics.median(short), "long": long}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.rates needs a GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    rates = {name: measure(one, device) for name, one in workloads(device).items()}
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rates": rates}
    print(report["gpu"])
    for name, rate in rates.items():
        short, long, unit = rate["short"], rate["long"], rate["unit"]
        print(f"{name:5} {short:8.2f} {unit} in short runs, {long:8.2f} in a long one")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
