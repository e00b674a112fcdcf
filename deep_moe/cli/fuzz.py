"""`deep-moe fuzz`: random small layers under random schedules, all checks on, for a while."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .output import stdout


def fuzz(
    hours: Annotated[float, typer.Option("--hours", min=0, help="How long to go on.")] = 0,
    minutes: Annotated[float, typer.Option("--minutes", min=0, help="Added to --hours.")] = 0,
    first: Annotated[int, typer.Option("--first", min=0, help="Number of the first case.")] = 0,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Stop after this many cases.")
    ] = None,
) -> None:
    """Run cases one after the other; each failure ends with the line that repeats it."""
    from deep_moe.fuzzing import FuzzCase

    if not hours and not minutes and count is None:
        raise typer.BadParameter("say how long: --hours, --minutes or --count")
    ends = time.monotonic() + 3600 * hours + 60 * minutes
    number, num_failed = first, 0
    while (count is None or number < first + count) and (
        not (hours or minutes) or time.monotonic() < ends
    ):
        failure = FuzzCase.of(number).run()
        if failure:
            num_failed += 1
            stdout().print(failure, markup=False, highlight=False)
            stdout().print(f"repeat: deep-moe fuzz --first {number} --count 1", highlight=False)
        number += 1
    stdout().print(f"{number - first} cases, {num_failed} failed", highlight=False)
    if num_failed:
        raise typer.Exit(1)
