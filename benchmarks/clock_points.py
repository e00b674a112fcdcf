"""The clock's predictions of the layer's time beside what was measured, every point.

    python -m benchmarks.clock_points

prints the tables of docs/clock.md from the records in benchmarks/chips/ and benchmarks/results/.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .tables import markdown_table

FOLDER = Path(__file__).parent
CHIPS = FOLDER / "chips"
MEASURED_ON_ONE = CHIPS / "layer-h100-2026-11-26.json"
MEASURED_ON_TWO = "h100x2-2026-11-25-*.json"
# The first was committed before it was compared; its parameters knew nothing of the layer.
PREDICTIONS = {
    "first": "predictions-h100-2026-11-26.json",
    "second": "predictions-h100-2026-11-26-copies.json",
    "third": "predictions-h100-2026-11-26-queues.json",
}
# The same clock with costs of a table and with those of the kernels' machine code.
BY_COSTS = "predictions-h100-2026-11-27-machine-code.json"
# Tiles in turn, each measured in several rounds beside the others.
TILES = "tiles-h100-2026-11-28.json"
# What the change between the first two was found with.
LOOKED_AT = {("flash", 1, 128, "mxfp4")}

Point = tuple[str, int, int, str]  # model, GPUs, tokens per rank, weights


def point_of(record: dict[str, Any]) -> Point:
    return record["model"], record["ranks"], record["tokens"], record["weights"]


def measured() -> dict[Point, dict[str, Any]]:
    found = {point_of(one): one for one in json.loads(MEASURED_ON_ONE.read_text())["results"]}
    for path in sorted((FOLDER / "results").glob(MEASURED_ON_TWO)):
        for one in json.loads(path.read_text())["results"]:
            model = "flash" if "flash" in one["model"] else "pro"
            point = model, 2, one["tokens_per_rank"], one["weights"]
            found[point] = {"us": one["us"]}
    return found


def predicted() -> dict[str, dict[Point, dict[str, Any]]]:
    """Each set's predictions, by its name."""
    files = {
        name: json.loads((CHIPS / file).read_text())["predictions"]
        for name, file in PREDICTIONS.items()
    }
    return {
        name: {point_of(one): one for one in predictions} for name, predictions in files.items()
    }


def errors(predictions: dict[Point, dict[str, Any]], points: Iterable[Point]) -> list[float]:
    found = measured()
    return [predictions[point]["us"] / found[point]["us"] - 1 for point in points]


def table() -> str:
    sets = predicted()
    found = measured()
    names = [cell for name in sets for cell in (f"{name} us", "error")]
    lines = [
        f"| model | weights | GPUs | tokens | measured us | {' | '.join(names)} |",
        "|---|---|" + "---:|" * (3 + len(names)),
    ]
    points = set().union(*sets.values())
    for point in sorted(points, key=lambda p: (p[3], p[0], p[1], p[2])):
        model, ranks, tokens, weights = point
        us = found[point]["us"]
        cells = []
        for predictions in sets.values():
            if point in predictions:
                value = predictions[point]["us"]
                cells += [f"{value:.1f}", f"{100 * (value / us - 1):+.1f} %"]
            else:
                cells += ["", ""]
        lines.append(
            f"| {model} | {weights} | {ranks} | {tokens} | {us:.1f} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def summary() -> str:
    sets = predicted()
    first, second, third = sets.values()
    unseen = [point for point in second if point not in LOOKED_AT]
    rows = [
        ("first, all points", first, list(first)),
        ("first, points of more than 8 tokens", first, [p for p in first if p[2] > 8]),
        ("first, points that the second has", first, [p for p in second if p in first]),
        ("second, all points", second, list(second)),
        ("second, without the point that was looked at", second, unseen),
        ("third, all points", third, list(third)),
        ("third, points that the second has", third, [p for p in second if p in third]),
    ]
    lines = ["| predictions | points | median error | worst error |", "|---|---:|---:|---:|"]
    for name, predictions, points in rows:
        sizes = [abs(error) for error in errors(predictions, points)]
        lines.append(
            f"| {name} | {len(sizes)} | {100 * statistics.median(sizes):.1f} % | "
            f"{100 * max(sizes):.1f} % |"
        )
    return "\n".join(lines)


PHASES = (
    "counts known, pull begins",
    "first tokens there, mean CTA",
    "pull ends, last CTA",
    "first block begins, mean CTA",
    "last Linear1 block ends, last CTA",
    "last block ends, mean CTA",
    "combine begins",
    "kernel ends",
)


def phases(point: Point = ("flash", 1, 128, "mxfp4")) -> str:
    """Of the first predictions."""
    lines = ["| moment, us | measured | first |", "|---|---:|---:|"]
    timelines = [
        measured()[point]["timeline"],
        predicted()["first"][point]["phases"]["timeline"],
    ]
    for name in PHASES:
        lines.append(f"| {name} | " + " | ".join(f"{t[name]:.1f}" for t in timelines) + " |")
    return "\n".join(lines)


def recording() -> str:
    """Calls of one GPU with and without their recording. Events see more of a call than the time
    inside its kernel, so the difference is the least that recording can take."""
    columns = [
        "model",
        "weights",
        "tokens",
        "between events us",
        "recorded, inside us",
        "at least longer by us",
    ]
    rows = []
    for one in json.loads(MEASURED_ON_ONE.read_text())["results"]:
        inside = one["timeline"]["kernel ends"]
        cells = [f"{us:.1f}" for us in (one["us"], inside, inside - one["us"])]
        rows.append([one["model"], one["weights"], str(one["tokens"]), *cells])
    return markdown_table(columns, rows).rstrip()


def tiles() -> str:
    """Of one call with each of several numbers of rows."""
    columns = [
        "tokens",
        "rows",
        "measured us",
        "to the first",
        "predicted us",
        "to the first",
        "error",
    ]
    rows = []
    first: dict[int, dict[str, Any]] = {}
    for one in json.loads((CHIPS / TILES).read_text())["results"]:
        begin = first.setdefault(one["tokens"], one)
        cells = [str(one["tokens"]), str(one["block_m"])]
        for kind in ("us", "predicted_us"):
            cells += [f"{one[kind]:.1f}", f"{100 * (one[kind] / begin[kind] - 1):+.1f} %"]
        rows.append([*cells, f"{100 * (one['predicted_us'] / one['us'] - 1):+.1f} %"])
    return markdown_table(columns, rows).rstrip()


EPILOGUES = ("Linear1 epilogue", "Linear2 epilogue")


def by_costs() -> tuple[str, str, str]:
    """With costs of the table and of machine code: errors in all, totals, epilogues."""
    found = measured()
    predictions = {
        point_of(one): one for one in json.loads((CHIPS / BY_COSTS).read_text())["predictions"]
    }
    totals = ["| model | weights | tokens | rows | table | machine code |"]
    totals.append("|---|---|" + "---:|" * 4)
    epilogues = ["| model | weights | rows | step, us | measured | table | machine code |"]
    epilogues.append("|---|---|---:|---|" + "---:|" * 3)
    errors_of: dict[str, list[float]] = {kind: [] for kind in ("table", "machine code")}
    for point, one in sorted(predictions.items(), key=lambda item: (item[0][3], *item[0])):
        model, _, tokens, weights = point
        known = found[point]
        cells = [model, weights, str(tokens), str(known["block_m"])]
        for kind, sizes in errors_of.items():
            error = one[kind]["us"] / known["us"] - 1
            sizes.append(abs(error))
            cells.append(f"{100 * error:+.1f} %")
        totals.append(f"| {' | '.join(cells)} |")
        for step in EPILOGUES if EPILOGUES[0] in one["table"] else ():
            cells = [model, weights, str(known["block_m"]), f"{step}s, {tokens} tokens"]
            cells.append(f"{known['tracks']['math'][step]:.1f}")
            cells += [f"{one[kind][step]:.1f}" for kind in errors_of]
            epilogues.append(f"| {' | '.join(cells)} |")
    sums = ["| costs of | points | median error | worst error |", "|---|---:|---:|---:|"]
    sums += [
        f"| {kind} | {len(sizes)} | {100 * statistics.median(sizes):.1f} % | "
        f"{100 * max(sizes):.1f} % |"
        for kind, sizes in errors_of.items()
    ]
    return "\n".join(sums), "\n".join(totals), "\n".join(epilogues)


def main() -> None:
    print(summary(), table(), tiles(), phases(), recording(), *by_costs(), sep="\n\n")


if __name__ == "__main__":
    main()
