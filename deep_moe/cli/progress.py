"""Progress of a run, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .output import stderr

if TYPE_CHECKING:
    from deep_moe.heuristics import MoEShape

# Of a processor (2 cores, 2026-11-26): making a weight, laying it out and multiplying it by the
# fewest rows; a product in the emulator and in the reference.
_SECONDS_PER_WEIGHT, _SECONDS_PER_PRODUCT = 35e-9, 3e-9
_SAID_FROM_SECONDS = 60


def say_how_long(shape: MoEShape, num_tokens: int) -> None:
    """Where the emulator takes more than a minute. num_tokens: of all ranks and calls."""
    per_expert = shape.num_weights_per_expert
    num_weights = (shape.num_experts + shape.num_shared_experts) * per_expert
    seconds = num_weights * _SECONDS_PER_WEIGHT
    seconds += num_tokens * shape.num_slots * per_expert * _SECONDS_PER_PRODUCT
    if seconds >= _SAID_FROM_SECONDS:
        stderr().print(
            f"this takes about {seconds / 60:.0f} minutes: {num_weights / 1e9:.1f} billion weights "
            "in the emulator; fewer --experts or a smaller --hidden take less"
        )


@contextmanager
def bar(text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on standard error from now on, and what changes its text. total: steps, where they are
    known."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task(text, total=total)

        def say(text: str, advance: int = 0) -> None:
            progress.update(task, description=text, advance=advance)

        yield say
