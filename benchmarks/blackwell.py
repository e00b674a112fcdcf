"""The SM100 kernel and its rival on a chip's clock, with the same draws of what is uncertain.

    python -m benchmarks.blackwell --headers DIR --json FILE --models flash --tokens 512 --draws 8

simulates both at each point: once with the chip's values, then with draws of all its uncertain
parameters. It goes on where FILE ends. Without `--models` it only prints the table of FILE.
`--weights nvfp4` takes NVFP4 weights and tokens, in place of MXFP4 weights and MXFP8 tokens.
Nothing here is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deep_moe.emulator import Chip, chips
from deep_moe.heuristics.presets import preset_shape
from deep_moe.heuristics.segments import align_up
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.trial.simulated import simulate_call
from deep_moe.weights import WeightsName

from .sm100_rival import FORMATS, VERSION, simulate_rival

NOMINAL = -1  # in place of a draw's number: the chip's own values
# Of the rival, 8 B200s, MXFP8 tokens and MXFP4 weights, as its authors published them.
PUBLISHED = {
    ("flash", 1): 56.5,
    ("flash", 512): 146.5,
    ("flash", 8192): 1283.0,
    ("flash", 32768): 4856.0,
    ("pro", 1): 108.1,
    ("pro", 512): 369.6,
    ("pro", 8192): 2818.0,
    ("pro", 32768): 10655.0,
}
PUBLISHED_CHIP, PUBLISHED_RANKS = "b200", 8
PUBLISHED_WEIGHTS: WeightsName = "mxfp4"
_MIRRORED_TOKENS = 64  # from which on one rank is simulated, and its peers mirror it


def draw(chip: Chip, number: int) -> Chip:
    """The chip with every uncertain parameter drawn anew, log-normally: one standard deviation is
    what its file says. NOMINAL: as it is."""
    if number == NOMINAL:
        return chip
    deviates = np.random.default_rng(number).standard_normal(len(chip.parameters))
    values = {
        name: parameter.value * math.exp(math.log1p(parameter.uncertainty) * deviate)
        for (name, parameter), deviate in zip(chip.parameters.items(), deviates, strict=True)
        if parameter.uncertainty
    }
    drawn = chip.replace(**values)
    return drawn.replace(
        mma_clock_mhz=min(drawn.value("mma_clock_mhz"), drawn.value("max_clock_mhz"))
    )


def simulate(
    which: str,
    model: str,
    num_ranks: int,
    num_tokens: int,
    chip: Chip,
    headers: Path | None,
    weights: WeightsName = PUBLISHED_WEIGHTS,
) -> dict[str, Any]:
    """Microseconds of one call's kernel: the mean over ranks, as the published figures are. Of so
    many ranks that they cannot share the model's experts evenly, it has a few more. weights: MXFP4
    with MXFP8 tokens, or NVFP4 with NVFP4 tokens."""
    shape = preset_shape(f"deepseek-v4-{model}", num_ranks=1, num_max_tokens_per_rank=num_tokens)
    shape = dataclasses.replace(
        shape,
        num_ranks=num_ranks,
        num_experts=align_up(shape.num_experts, num_ranks),
        weights=weights,
        token_format=FORMATS[weights].token_format,
    )
    mirrored = num_ranks > 1 and num_tokens >= _MIRRORED_TOKENS
    began = time.process_time()
    if which == "ours":
        shape = dataclasses.replace(shape, num_pool_tokens=DEFAULT_POOL_TOKENS)
        launches = simulate_call(shape, [num_tokens] * num_ranks, chip, mirrored=mirrored).launches
    elif headers is None:
        raise ValueError("headers must name the rival's headers")
    else:
        launches = simulate_rival(shape, num_tokens, chip, headers, mirrored=mirrored)
    return {
        "us": statistics.mean(launch.ns for launch in launches) / 1e3,
        "mhz": statistics.mean(launch.clock_mhz for launch in launches),
        "hbm_mb": statistics.mean(launch.hbm_bytes for launch in launches) / 1e6,
        "mirrored": mirrored,
        "host_seconds": round(time.process_time() - began),
    }


def weights_of(record: dict[str, Any]) -> str:
    """Of a record; the first ones do not say it."""
    return str(record.get("weights", PUBLISHED_WEIGHTS))


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """The 5th and the 95th percentile."""
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(high)


def table(
    results: Iterable[dict[str, Any]],
    chip: str = PUBLISHED_CHIP,
    weights: str = PUBLISHED_WEIGHTS,
) -> str:
    """Points as rows: nominal times and intervals over draws, in microseconds."""
    found: dict[tuple[str, int, int], dict[str, dict[int, float]]] = {}
    for one in results:
        point = one["model"], one["ranks"], one["tokens"]
        found.setdefault(point, {}).setdefault(one["kernel"], {})[one["draw"]] = one["us"]
    lines = [
        "| model | GPUs | tokens | published us | rival us | interval | ours us | interval "
        "| rival / ours | interval | draws |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (model, ranks, tokens), kernels in sorted(found.items()):
        published_ones = PUBLISHED_RANKS, PUBLISHED_CHIP, PUBLISHED_WEIGHTS
        is_published = (ranks, chip, weights) == published_ones
        published = PUBLISHED.get((model, tokens)) if is_published else None
        cells = [model, str(ranks), str(tokens), f"{published or '':}"]
        for kernel in ("rival", "ours"):
            cells += _cells(kernels.get(kernel, {}), 1)
        rival, ours = kernels.get("rival", {}), kernels.get("ours", {})
        both = rival.keys() & ours.keys()
        cells += _cells({number: rival[number] / ours[number] for number in both}, 2)
        cells.append(str(len(both - {NOMINAL})))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(values: dict[int, float], digits: int) -> list[str]:
    drawn = [value for number, value in values.items() if number != NOMINAL]
    nominal = f"{values[NOMINAL]:.{digits}f}" if NOMINAL in values else ""
    if len(drawn) < 2:
        return [nominal, ""]
    low, high = quantiles(drawn)
    return [nominal, f"{low:.{digits}f} to {high:.{digits}f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--headers", type=Path, help="the rival's deep_gemm/include")
    parser.add_argument("--chip", default="b200")
    parser.add_argument("--weights", default=PUBLISHED_WEIGHTS, choices=tuple(FORMATS))
    parser.add_argument("--models", nargs="*", default=[], choices=("flash", "pro"))
    parser.add_argument("--kernels", nargs="*", default=("rival", "ours"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=(512,))
    parser.add_argument("--draws", type=int, default=0)
    given = parser.parse_args(arguments)
    record = {
        "what": "microseconds of kernels on a simulated chip, none of them measured",
        "chip": given.chip,
        "rival": f"sgl-deep-gemm {VERSION}",
        "weights": given.weights,
        "results": [],
    }
    if given.json.exists():
        record = json.loads(given.json.read_text())
    of_record, wanted = (record["chip"], weights_of(record)), (given.chip, given.weights)
    if given.models and of_record != wanted:
        parser.error(f"--json must name a record of {wanted}; got one of {of_record}")
    keys = "kernel", "model", "ranks", "tokens", "draw"
    done = {tuple(one[key] for key in keys) for one in record["results"]}
    points = [
        (kernel, model, given.ranks, tokens, number)
        for number in range(NOMINAL, given.draws)
        for tokens in given.tokens
        for model in given.models
        for kernel in given.kernels
    ]
    for point in points:
        if point in done:
            continue
        kernel, model, ranks, tokens, number = point
        chip = draw(chips.load(given.chip), number)
        times = simulate(kernel, model, ranks, tokens, chip, given.headers, given.weights)
        record["results"].append(dict(zip(keys, point, strict=True)) | times)
        given.json.write_text(json.dumps(record, indent=1) + "\n")
        print(*point, f"{times['us']:.1f} us", flush=True)
    print(table(record["results"], record["chip"], weights_of(record)))


if __name__ == "__main__":
    main()
