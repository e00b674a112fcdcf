"""Marks in the headers, and the statements that they stand for.

A mark is a comment `//~ name`, behind a statement or, where the line would be too long, on a line
of its own in front of one. It may say more behind a colon, like any other comment. It stands for
the statement, wherever that moves and however it is broken into lines, from its first token up to
its semicolon, or up to the brace that opens its block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"//~ (\w+)")
_COMMENT_OR_DIRECTIVE = re.compile(r"//[^\n]*|^[ \t]*#[^\n]*", re.MULTILINE)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


@dataclass(frozen=True)
class Statement:
    """`text[begin:end]` of a file."""

    path: Path
    begin: int
    end: int


def find_marks(folder: Path) -> dict[str, list[Statement]]:
    """The statements of every mark in the headers below `folder`."""
    found: dict[str, list[Statement]] = {}
    for path in sorted(folder.rglob("*.cuh")):
        text = path.read_text()
        code = _code_of(text)
        for mark in MARK.finditer(text):
            line_begin = text.rfind("\n", 0, mark.start()) + 1
            is_behind = code[line_begin : mark.start()].strip() != ""
            span = _before(code, mark.start()) if is_behind else _behind(code, mark.end())
            found.setdefault(mark.group(1), []).append(Statement(path, *span))
    return found


def _code_of(text: str) -> str:
    """The text with blanks for all that is no code. A directive ends the statement before it."""

    def blank(match: re.Match[str]) -> str:
        is_directive = not match.group().startswith("//")
        return " " * (len(match.group()) - is_directive) + ";" * is_directive

    text = _STRING.sub(lambda match: "_" * len(match.group()), text)
    return _COMMENT_OR_DIRECTIVE.sub(blank, text)


def _before(code: str, position: int) -> tuple[int, int]:
    """The statement that ends there."""
    end = len(code[:position].rstrip())
    idx = end - 1
    depth = 1 if code[idx] == "}" else 0  # a function in one line
    while idx > 0:
        idx -= 1
        if code[idx] in ")]" or (code[idx] == "}" and _is_in_expression(code, idx)):
            depth += 1
        elif code[idx] in "([" or (code[idx] == "{" and depth > 0):
            depth -= 1
        elif code[idx] in ";{}" and depth <= 0:
            break
    return end - len(code[idx + 1 : end].lstrip()), end


def _behind(code: str, position: int) -> tuple[int, int]:
    """The statement that begins there."""
    begin = len(code) - len(code[position:].lstrip())
    depth = 0
    for idx in range(begin, len(code)):
        if code[idx] in "([":
            depth += 1
        elif code[idx] in ")]":
            depth -= 1
        elif depth == 0 and (code[idx] == ";" or re.match(r"\{[ \t]*\n", code[idx:])):
            return begin, idx + 1
    raise ValueError(f"no statement behind {code[position : position + 80]!r}")


def _is_in_expression(code: str, closing_brace: int) -> bool:
    """Whether a brace closes an initializer or a lambda, not a block of statements."""
    if re.match(r"\s*[;,)]", code[closing_brace + 1 :]):
        return True
    depth = 0
    for idx in range(closing_brace, 0, -1):
        depth += (code[idx] == "}") - (code[idx] == "{")
        if depth == 0:
            return code[idx - 1].isalnum() or code[idx - 1] in "_>"
    return False
