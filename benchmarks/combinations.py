"""Compiles and runs every combination of what a kernel is made of, and records what came of it.

    python -m benchmarks.combinations     # renews combinations.json and COMBINATIONS.md
    python -m benchmarks.combinations --arch sm_100a --compile-only

A combination is a format of weights (and of tokens' scales, where there are two), an activation,
biases or none, shared experts or none, and a pool with a row for every token or one that is a ring.
Whether results are written to y or added takes turns. First a real layer's kernel for many tokens
is compiled for each, whose registers and spills are recorded. Then the emulator runs a small layer
of each in two calls with all of its checks, and results are compared bit for bit, or with their
bounds. Nothing here needs a GPU.

Started again, it goes on where it was: kernels come from the cache, and what the file has of the
same kernel stands. Records of targets that are not asked for stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deep_moe import jit
from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.targets import TARGETS, MegaMoEConfig, choose_config
from deep_moe.trial.fuzzing import FuzzCase, axes

FOLDER = Path(__file__).resolve().parent
MODEL, NUM_RANKS, NUM_TOKENS = "deepseek-v4-pro", 8, 8192
NUM_RING_TOKENS = 24576  # of the real layer's pool, where it is a ring
# What the small layer has in all combinations.
SMALL = {
    "shape": (2, 4, 3, 256, 96),
    "tile": 0,
    "turns": "of one m-block",
    "turn": "one expert",
    "inputs": "filled",
    "tokens": "any",
    "slots": "all",
    "values": "numbers",
    "schedule": "random",
}

# Axes that share a row of the table, by their names in records, each with its values in words.
SHARED_AXES: dict[str, dict[Any, str]] = {
    "biases": {False: "no biases", True: "biases"},
    "num_shared_experts": {0: "no shared expert", 1: "a shared expert"},
    "pool": {"whole": "a row for every token", "ring": "a ring"},
    "accumulate": {False: "results written", True: "results added"},
}

Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    compiler = jit.compiler_version()
    everything = {name_of(case): case for arch in TARGETS for case in combinations(arch)}
    asked = {name: case for name, case in everything.items() if case.arch in arguments.arch}
    known = known_records(arguments.json, compiler)
    records = {name: known[name] for name in everything if name in known}

    def keep(number: int, name: str, record: Record) -> None:
        records[name] = record
        write(arguments.json, compiler, records.values())
        print(f"{number}/{len(asked)} {name}: {in_words(record)}", flush=True)

    for number, (name, case) in enumerate(asked.items(), 1):
        built = built_record(case)
        if name not in records or records[name]["key"] != built["key"]:
            keep(number, name, built)
    for number, (name, case) in enumerate(asked.items(), 1):
        if not arguments.compile_only and records[name]["failure"] is None:
            keep(number, name, records[name] | run_small(case))
    in_order = [records[name] for name in everything if name in records]
    write(arguments.json, compiler, in_order)
    arguments.table.write_text(page_of(in_order, compiler, everything.values()))
    print("\n".join(table_of(in_order)))
    return int(any(records[name]["failure"] for name in asked))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=tuple(TARGETS), default=list(TARGETS))
    parser.add_argument("--compile-only", action="store_true", help="leave out the emulator")
    parser.add_argument("--json", type=Path, default=FOLDER / "combinations.json")
    parser.add_argument("--table", type=Path, default=FOLDER / "COMBINATIONS.md")
    return parser.parse_args(argv)


def combinations(arch: str) -> Iterator[FuzzCase]:
    """Of one architecture, as cases of the fuzz: the small layer's calls."""
    known = axes(arch)
    activations = {activation.name: activation for activation in known["activation"]}
    product = itertools.product(
        known["weights"], activations.values(), known["biases"], (0, 1), known["pool"]
    )
    for number, (weights, activation, biases, num_shared, pool) in enumerate(product):
        if biases != known["biases"][0] and not activation.has_gate:
            continue
        values = {
            "weights": weights,
            "activation": activation,
            "biases": biases,
            "shared experts": num_shared,
            "pool": pool,
            # By turns, but so that each value meets both of every axis with two.
            "y": known["y"][number.bit_count() % 2],
        }
        yield FuzzCase(number, arch, SMALL | values)


def axes_of(case: FuzzCase) -> Record:
    """What the combination is."""
    return {
        "arch": case.arch,
        "weights": case.values["weights"],
        "activation": case.values["activation"].name,
        "biases": case.shape.biases,
        "num_shared_experts": case.shape.num_shared_experts,
        "pool": "ring" if case.values["pool"] else "whole",
        "accumulate": case.accumulates,
    }


def name_of(case: FuzzCase) -> str:
    return name_of_axes(axes_of(case))


def name_of_axes(axes_values: Record) -> str:
    """Of a combination or its record, in words."""
    words = [axes_values["arch"], axes_values["weights"], axes_values["activation"]]
    words += ["biases"] * axes_values["biases"]
    words += ["shared"] * bool(axes_values["num_shared_experts"])
    words += ["ring"] * (axes_values["pool"] == "ring")
    words += ["added"] * axes_values["accumulate"]
    return ", ".join(words)


def real_config(case: FuzzCase) -> MegaMoEConfig:
    """That of the real layer with the case's axes."""
    shape: MoEShape = dataclasses.replace(
        preset_shape(MODEL, num_ranks=NUM_RANKS, num_max_tokens_per_rank=NUM_TOKENS),
        weights=case.shape.weights,
        token_format=case.shape.token_format,
        biases=case.shape.biases,
        num_shared_experts=case.shape.num_shared_experts,
        num_pool_tokens=NUM_RING_TOKENS if case.values["pool"] else None,
    )
    return choose_config(
        shape,
        NUM_TOKENS,
        arch=case.arch,
        activation=case.values["activation"],
        accumulate=case.accumulates,
    )


def built_record(case: FuzzCase) -> Record:
    """What ptxas made of the real layer's kernel. The small layer has not run: failure is None."""
    config = real_config(case)
    kernel = jit.build(config)
    return {
        **axes_of(case),
        "block_m": config.block_m,
        **kernel.manifest["resources"],
        "compile_seconds": kernel.manifest["compile_seconds"],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "key": kernel.key,
        "failure": None,
    }


def run_small(case: FuzzCase) -> Record:
    """What came of the small layer: failure is "" if all was right."""
    before = time.perf_counter()
    failure = case.run()
    return {"failure": failure, "run_seconds": round(time.perf_counter() - before, 1)}


def known_records(file: Path, compiler: str) -> dict[str, Record]:
    """What an earlier run with the same compiler left, by name."""
    if not file.exists():
        return {}
    report = json.loads(file.read_text())
    if report["compiler"] != compiler:
        return {}
    return {name_of_axes(record): record for record in report["records"]}


def write(file: Path, compiler: str, records: Iterable[Record]) -> None:
    """With a line for each record."""
    lines = ",\n".join(json.dumps(record) for record in records)
    file.write_text(f'{{"compiler": {json.dumps(compiler)}, "records": [\n{lines}\n]}}\n')


def num_spilled_bytes(record: Record) -> int:
    return int(record["spill_store_bytes"] + record["spill_load_bytes"])


def in_words(record: Record) -> str:
    """What came of a combination."""
    outcome = {None: "not run yet", "": "right"}.get(record["failure"], record["failure"])
    return (
        f"{record['num_registers']} registers, {record['spill_store_bytes']}/"
        f"{record['spill_load_bytes']} bytes spilled, {outcome}"
    )


def page_of(records: Sequence[Record], compiler: str, everything: Iterable[FuzzCase]) -> str:
    """COMBINATIONS.md. everything: all combinations that there are."""
    every = [axes_of(case) for case in everything]
    dates = sorted({record["date"] for record in records})
    num_run = sum(record["failure"] is not None for record in records)
    num_right = sum(record["failure"] == "" for record in records)
    free = sum(num_spilled_bytes(record) == 0 for record in records)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return "\n".join(
        [
            "# Every combination of what a kernel is made of",
            "",
            "`python -m benchmarks.combinations` makes this page. The program needs no GPU, and "
            "its docstring says what it does. [combinations.json](combinations.json) has all "
            f"records. They are from {when}, by {compiler}.",
            "",
            f"There are {len(every)} combinations. The record has {len(records)}. Of these "
            f"{free} have no spills. The emulator ran {num_run}, and {num_right} were right.",
            *lacking(records, every),
            "",
            "A row stands for all combinations of biases, shared experts and pool. Registers and "
            f"spills are those of {MODEL} on {NUM_RANKS} ranks with {NUM_TOKENS} tokens each, in "
            "the tile that the heuristics choose. Spills are bytes of stores and loads together, "
            "as ptxas reports them: the least and the most of the row's kernels. Local memory is "
            "a thread's stack in bytes, which holds the spills.",
            "",
            *table_of(records),
            "",
            *spills_by_axis(records),
        ]
    )


def lacking(records: Sequence[Record], every: Sequence[Record]) -> list[str]:
    """Which formats and activations have come since the record was made."""
    lines = []
    for axis, name in (("weights", "formats"), ("activation", "activations")):
        recorded = {(record["arch"], record[axis]) for record in records}
        new = [(one["arch"], one[axis]) for one in every]
        missing = [pair for pair in dict.fromkeys(new) if pair not in recorded]
        for (arch,), own in groups([{"arch": a, "value": v} for a, v in missing], by_arch):
            values = ", ".join(sorted(one["value"] for one in own))
            lines += ["", f"Not in the record of {arch}: the {name} {values}."]
    return lines


def table_of(records: Sequence[Record]) -> list[str]:
    """A row for each architecture, format and activation."""
    lines = [
        "| target | weights | activation | right of those run | rows of a tile | registers "
        "| spill-free | spills | local memory |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (arch, weights, activation), own in groups(
        records, lambda record: tuple(record[name] for name in ("arch", "weights", "activation"))
    ):
        num_run = sum(record["failure"] is not None for record in own)
        right = sum(record["failure"] == "" for record in own)
        free = sum(num_spilled_bytes(record) == 0 for record in own)
        cells = [
            arch,
            weights,
            activation,
            f"{right} of {num_run}",
            span(record["block_m"] for record in own),
            span(record["num_registers"] for record in own),
            f"{free} of {len(own)}",
            span(num_spilled_bytes(record) for record in own),
            span(record["stack_bytes"] for record in own),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spills_by_axis(records: Sequence[Record]) -> list[str]:
    """For each architecture, what the axes that share a row of the table make of its spills."""
    lines = []
    for (arch,), own in groups(records, by_arch):
        if not any(map(num_spilled_bytes, own)):
            lines += [f"{arch}: no kernel spills.", ""]
            continue
        lines += [f"| {arch} with | kernels that spill | bytes on average |", "|---|---:|---:|"]
        for axis, words in SHARED_AXES.items():
            for value, word in words.items():
                spilled = [num_spilled_bytes(record) for record in own if record[axis] == value]
                if spilled:
                    num = sum(map(bool, spilled))
                    mean = statistics.mean(spilled)
                    lines.append(f"| {word} | {num} of {len(spilled)} | {mean:.0f} |")
        lines.append("")
    return lines


def by_arch(record: Record) -> tuple[Any, ...]:
    return (record["arch"],)


def groups(
    records: Iterable[Record], key: Callable[[Record], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Records with equal keys, in the order in which keys come."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return list(found.items())


def span(values: Iterable[int]) -> str:
    """The least and the most.

    >>> span([168, 168]), span([8, 0, 48])
    ('168', '0 to 48')
    """
    in_order = sorted(values)
    least, most = in_order[0], in_order[-1]
    return str(least) if least == most else f"{least} to {most}"


if __name__ == "__main__":
    sys.exit(main())
