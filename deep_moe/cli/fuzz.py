"""`deep-moe fuzz`: random small layers under random schedules, all checks on, for a while."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
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
    arch: Annotated[
        str | None, typer.Option("--arch", help="Cases of this architecture only.")
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            "--corpus",
            dir_okay=False,
            help="A file of case numbers, one per line: they come first; what fails is added.",
        ),
    ] = None,
) -> None:
    """Run cases one after the other; each failure ends with the line that repeats it."""
    from deep_moe.fuzzing import ARCHS, FuzzCase

    if not hours and not minutes and count is None:
        raise typer.BadParameter("say how long: --hours, --minutes or --count")
    if arch is not None and arch not in ARCHS:
        raise typer.BadParameter(f"--arch must be one of {', '.join(ARCHS)}; got {arch!r}")
    known = [] if corpus is None else _numbers(corpus)
    ends = time.monotonic() + 3600 * hours + 60 * minutes
    num_run = num_failed = 0
    for number in itertools.chain(known, _without(first, known)):
        if num_run == count or ((hours or minutes) and time.monotonic() >= ends):
            break
        case = FuzzCase.of(number)
        if arch not in (None, case.arch):
            continue
        num_run += 1
        failure = case.run()
        if failure:
            num_failed += 1
            stdout().print(f"{case}\n{failure}", markup=False, highlight=False)
            stdout().print(f"repeat: deep-moe fuzz --first {number} --count 1", highlight=False)
            if corpus is not None and number not in known:
                with corpus.open("a") as file:
                    file.write(f"{number}\n")
    stdout().print(f"{num_run} cases, {num_failed} failed", highlight=False)
    if num_failed:
        raise typer.Exit(1)


def _numbers(corpus: Path) -> list[int]:
    """Those in the file, each once. A file that does not exist yet has none."""
    words = corpus.read_text().split() if corpus.exists() else []
    if not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"--corpus must hold one case number per line: {corpus}")
    return list(dict.fromkeys(map(int, words)))


def _without(first: int, known: list[int]) -> Iterator[int]:
    """All numbers from `first` on that are not known."""
    return (number for number in itertools.count(first) if number not in known)
