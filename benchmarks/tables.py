"""Tables in Markdown, as benchmarks write them for documents."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 0) -> str:
    """words: how many of the first columns are words; the others are numbers.

    >>> print(markdown_table(["sizes", "ms"], [["small", "1.5"]], words=1), end="")
    | sizes | ms |
    |---|---:|
    | small | 1.5 |
    """
    rule = "|---" * words + "|---:" * (len(columns) - words) + "|"
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
