"""Where commands write: results to stdout, as tables or JSON; progress and errors to stderr."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def stdout() -> Console:
    """A console on the present standard output. Text is printed as it is: what looks like markup or
    the name of an emoji may be a file's name."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """A console on the present standard error, otherwise as `stdout`."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def coloured(text: str, colour: str) -> Text:
    """Text for a table or a console."""
    return Text(text, style=colour)


def print_json(value: Any) -> None:
    """One JSON document, plain and on stdout."""
    print(json.dumps(value, indent=2))


def print_error(text: str) -> None:
    """An error, exactly as the library worded it."""
    stderr().print(coloured("error:", "red"), end=" ")
    stderr().print(text, soft_wrap=True)


def new_table(
    title: str, *columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()
) -> Table:
    """A table with the named columns; those in `right` hold numbers. Numbers and what is in
    `whole` are never broken over lines."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column in right or column in whole,
            overflow="fold",
        )
    return table


def format_bytes(num_bytes: int) -> str:
    """A size for people: exact below 10 KiB, else in the largest unit that keeps it above 1."""
    if num_bytes < 10 * 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}"
