"""Docstrings of calls that take what another call takes: help() and the site tell all, and the text
stands once."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

_Call = TypeVar("_Call", bound=Callable[..., Any])


def described_as(
    *others: Callable[..., Any], errors_of: Callable[..., Any] | None = None
) -> Callable[[_Call], _Call]:
    """A decorator. Parameters that the docstring of a function or class leaves out are described as
    the first of `others` does that knows them, and so are errors, if it lists none: those of
    `errors_of`, or of the first that lists some.

    >>> def widen(values, width):
    ...     \"\"\"Widen.
    ...
    ...     Args:
    ...         values: to begin with.
    ...         width: of the
    ...             result.
    ...
    ...     Raises:
    ...         ValueError: it is less.
    ...     \"\"\"
    >>> @described_as(widen)
    ... def widen_all(values, width):
    ...     \"\"\"Widen each.
    ...
    ...     Args:
    ...         values: a list.
    ...     \"\"\"
    >>> print(widen_all.__doc__)
    Widen each.
    <BLANKLINE>
    Args:
        values: a list.
        width: of the
            result.
    <BLANKLINE>
    Raises:
        ValueError: it is less.
    """

    def describe(call: _Call) -> _Call:
        text = inspect.getdoc(call)
        if not text:  # python -OO
            return call
        known: dict[str, str] = {}
        for other in reversed(others):
            known |= _entries(inspect.getdoc(other) or "", "Args")
        own = _entries(text, "Args")
        parameters = [name for name in inspect.signature(call).parameters if name in known]
        entries = {**{name: known[name] for name in parameters}, **own}
        given = "".join(entries[name] for name in dict.fromkeys([*parameters, *entries]))
        text = _with_section(text, "Args", given)
        if not _entries(text, "Raises"):
            sources = others if errors_of is None else (errors_of,)
            raised = (_entries(inspect.getdoc(other) or "", "Raises") for other in sources)
            text = _with_section(text, "Raises", "".join(next(filter(None, raised), {}).values()))
        call.__doc__ = text
        return call

    return describe


def _section(title: str) -> re.Pattern[str]:
    """Its lines are indented; the first blank line ends it."""
    return re.compile(rf"^{title}:\n((?: +\S.*(?:\n|\Z))+)", re.MULTILINE)


def _entries(text: str, title: str) -> dict[str, str]:
    """The entries of a section by name, as they stand there."""
    found = _section(title).search(text)
    if found is None:
        return {}
    lines = textwrap.indent(textwrap.dedent(found[1]), "    ").rstrip() + "\n"
    entries = re.split(r"(?m)^(?=    \S)", lines)[1:]
    return {entry.partition(":")[0].strip(): entry for entry in entries}


def _with_section(text: str, title: str, entries: str) -> str:
    """The text with these entries in its section, which is made if need be."""
    if not entries:
        return text
    section = f"{title}:\n{entries}"
    if (found := _section(title).search(text)) is None:
        return f"{text.rstrip()}\n\n{section}".rstrip()
    return f"{text[: found.start()]}{section}{text[found.end() :]}".rstrip()
