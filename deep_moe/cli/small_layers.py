"""What `deep-moe run` does without options."""

from __future__ import annotations

import time
from typing import Any

import typer

from .fuzz import NUM_WORKERS
from .output import coloured, new_table, print_json, stdout
from .progress import bar


def run_small_layers(as_json: bool) -> None:
    """Run them, and say which results are right."""
    from deep_moe.trial.fuzz_workers import outcomes
    from deep_moe.trial.small_layers import SMALL_LAYERS, words_of

    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with bar("small layers", total=len(SMALL_LAYERS)) as say:
        for outcome in outcomes(SMALL_LAYERS, num_workers=NUM_WORKERS):
            case, failure = outcome.case, outcome.failure
            say(f"{case.path} on {case.arch}", advance=1)
            row = {"path": case.path, "arch": case.arch, "layer": words_of(case)}
            rows.append({**row, "failure": failure, "passed": not failure})
    passed = all(row["passed"] for row in rows)
    seconds = round(time.perf_counter() - started, 1)
    if as_json:
        print_json({"layers": rows, "seconds": seconds, "passed": passed})
    else:
        columns = ("path", "arch", "layer", "verdict")
        table = new_table(
            f"two calls of each in the emulator against the reference: {seconds:.1f} s",
            *columns,
            whole=("path", "arch", "verdict"),
        )
        for row in rows:
            verdict = coloured("ok", "green") if row["passed"] else coloured("DIFFERENT", "red")
            table.add_row(row["path"], row["arch"], row["layer"], verdict)
        stdout().print(table)
        for row in rows:
            if row["failure"]:
                stdout().print(f"{row['path']} on {row['arch']}: {row['failure']}")
    if not passed:
        raise typer.Exit(1)
