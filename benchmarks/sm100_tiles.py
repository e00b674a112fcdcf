"""SM100's tiles on a simulated B200 beside the cost by which heuristics choose among them.

    python -m benchmarks.sm100_tiles --json FILE --points flash:448:96,128 pro:512:96,128

simulates a call of each point with each of the tiles: model, tokens per rank and tiles, on 8 ranks.
It goes on where FILE ends. Without `--points` it only prints FILE. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deep_moe.emulator import chips
from deep_moe.heuristics.presets import preset_shape
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS, MoEShape
from deep_moe.heuristics.sm100 import expected_cost
from deep_moe.trial.simulated import simulate_call

NUM_RANKS = 8
RECORD = Path(__file__).parent / "results" / "simulated" / "b200-tiles-2026-11-27.json"


def shape_of(model: str, num_tokens: int) -> MoEShape:
    shape = preset_shape(
        f"deepseek-v4-{model}", num_ranks=NUM_RANKS, num_max_tokens_per_rank=num_tokens
    )
    return dataclasses.replace(shape, num_pool_tokens=DEFAULT_POOL_TOKENS)


def simulate(model: str, num_tokens: int, block_m: int) -> float:
    """Microseconds of the kernel with the chip's values; one rank, whose peers mirror it."""
    launches = simulate_call(
        shape_of(model, num_tokens),
        [num_tokens] * NUM_RANKS,
        chips.load("b200"),
        mirrored=True,
        overrides={"block_m": block_m},
    ).launches
    return statistics.mean(launch.ns for launch in launches) / 1e3


def costs(model: str, num_tokens: int, tiles: Iterable[int]) -> dict[int, float]:
    """What the heuristics expect of an expert with each tile, in rows of products."""
    expected = shape_of(model, num_tokens).expected_tokens_per_local_expert(num_tokens)
    return {block_m: expected_cost(expected, block_m) for block_m in tiles}


def times(results: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[int, float]]:
    """Of each point, microseconds by tile."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for one in results:
        found.setdefault((one["model"], one["tokens"]), {})[one["block_m"]] = one["us"]
    return found


def table(results: Iterable[dict[str, Any]]) -> str:
    lines = ["| model | tokens | tiles: us | cost, rows |", "|---|---:|---|---|"]
    for (model, tokens), by_tile in sorted(times(results).items()):
        expected = costs(model, tokens, by_tile)
        cells = [
            ", ".join(f"{block_m}: {values[block_m]:.1f}" for block_m in sorted(by_tile))
            for values in (by_tile, expected)
        ]
        lines.append(f"| {model} | {tokens} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def parse_point(text: str) -> tuple[str, int, list[int]]:
    try:
        model, tokens, tiles = text.split(":")
        return model, int(tokens), [int(tile) for tile in tiles.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a point must be MODEL:TOKENS:TILE,TILE; got {text!r}"
        ) from None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("--points", nargs="*", default=[], type=parse_point)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "what": "microseconds of kernels on a simulated chip, none of them measured",
        "chip": "b200",
        "ranks": NUM_RANKS,
        "results": [],
    }
    if options.json.exists():
        record = json.loads(options.json.read_text())
    known = times(record["results"])
    for model, tokens, tiles in options.points:
        for block_m in tiles:
            if block_m in known.get((model, tokens), {}):
                continue
            us = round(simulate(model, tokens, block_m), 2)
            record["results"].append(
                {"model": model, "tokens": tokens, "block_m": block_m, "us": us}
            )
            options.json.write_text(json.dumps(record, indent=1) + "\n")
            print(model, tokens, block_m, us, "us", flush=True)
    print(table(record["results"]))


if __name__ == "__main__":
    main()
