"""Patterns by which configs name modules: `*` stands for any text, "re:" begins a regular
expression that must match from the first character on.

A config is somebody else's file. Python's `re` needs exponential time for some expressions, so
these are matched here, in time that is polynomial in the lengths of expression and name.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

from deep_moe.errors import CheckpointError

# How Python itself takes expressions apart.
_IS_IN_RE = sys.version_info >= (3, 11)
_parser = import_module("re._parser" if _IS_IN_RE else "sre_parse")
_ops: Any = import_module("re._constants" if _IS_IN_RE else "sre_constants")

_OF_ONE_CHARACTER = (_ops.LITERAL, _ops.NOT_LITERAL, _ops.ANY, _ops.IN)

_MAX_LENGTH = 2000  # characters of an expression


def any_matches(patterns: Iterable[str], name: str, source: str = "a config") -> bool:
    """Whether one of `patterns` names the module, or a module that it is part of. source: where
    they stand, for errors.

    >>> any_matches(["model.layers.0*"], "model.layers.0.mlp.experts.3.up_proj")
    True
    >>> any_matches(["re:.*experts.*up_proj"], "model.layers.0.mlp.experts.3.up_proj")
    True
    >>> any_matches(["model.layers.1"], "model.layers.10.mlp.experts.3.up_proj")
    False
    """
    try:
        return any(matches(pattern, name) for pattern in patterns)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def matches(pattern: str, name: str) -> bool:
    """Whether one pattern does."""
    if pattern.startswith("re:"):
        return regex_matches(pattern[3:], name)
    if "*" in pattern:
        return _glob_matches(pattern, name)
    return name == pattern or name.startswith(pattern + ".")


def _glob_matches(pattern: str, name: str) -> bool:
    first, *others = pattern.split("*")
    *middle, last = others
    if not name.startswith(first):
        return False
    position = len(first)
    for part in middle:
        found = name.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return len(name) - len(last) >= position and name.endswith(last)


def regex_matches(expression: str, name: str) -> bool:
    """Whether the expression matches from the first character of `name` on, as `re.match` does.

    Raises CheckpointError for what is no expression, and for one with back references.
    """
    return bool(_Matching(name).ends(_parsed(expression), 0))


@lru_cache
def _parsed(expression: str) -> Any:
    if len(expression) > _MAX_LENGTH:
        raise CheckpointError(
            f"a pattern must have at most {_MAX_LENGTH} characters; got "
            f"{len(expression)}: re:{expression[:40]}..."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"a pattern must be a regular expression; got re:{expression[:100]}: {error}"
        ) from error
    if parsed.state.flags & ~re.UNICODE:
        raise _not_taken(f"flags in re:{expression[:100]}")
    return parsed


def _not_taken(what: str) -> CheckpointError:
    return CheckpointError(
        "a pattern must consist of characters, sets, groups, alternatives, "
        f"repetitions and assertions; got {what}"
    )


class _Matching:
    """Of one name. A part of an expression is the set of places where it may end, for each where it
    begins: no way through is tried twice."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[tuple[int, int], frozenset[int]] = {}

    def ends(self, parts: Any, start: int) -> frozenset[int]:
        """Of a sequence of parts."""
        key = id(parts), start
        if key not in self._known:
            places = frozenset({start})
            for part in parts:
                places = frozenset().union(*(self._of(part, place) for place in places))
                if not places:
                    break
            self._known[key] = places
        return self._known[key]

    def _of(self, part: tuple[Any, Any], start: int) -> frozenset[int]:
        op, argument = part
        if op in (_ops.MAX_REPEAT, _ops.MIN_REPEAT):
            least, most, inner = argument
            return self._repeated(least, most, inner, start)
        if op is _ops.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise _not_taken("flags of a group")
            return self.ends(inner, start)
        if op is _ops.BRANCH:
            return frozenset().union(*(self.ends(inner, start) for inner in argument[1]))
        if op in (_ops.ASSERT, _ops.ASSERT_NOT):
            direction, inner = argument
            if direction < 0:
                raise _not_taken("a look behind")
            holds = bool(self.ends(inner, start)) == (op is _ops.ASSERT)
            return frozenset({start}) if holds else frozenset()
        if op is _ops.AT:
            return frozenset({start}) if self._is_at(argument, start) else frozenset()
        if op not in _OF_ONE_CHARACTER:
            raise _not_taken(str(op))
        if start == len(self._name) or not _is_in(part, self._name[start]):
            return frozenset()
        return frozenset({start + 1})

    def _repeated(self, least: int, most: Any, inner: Any, start: int) -> frozenset[int]:
        """Rounds beyond the name's length lead nowhere else."""
        length = len(self._name) + 1
        places = frozenset({start})
        for _ in range(min(int(least), length)):
            places = frozenset().union(*(self.ends(inner, place) for place in places))
        every, new = set(places), places
        for _ in range(min(int(most) - int(least), length)):
            new = frozenset().union(*(self.ends(inner, place) for place in new)) - every
            if not new:
                break
            every |= new
        return frozenset(every)

    def _is_at(self, where: Any, place: int) -> bool:
        if where in (_ops.AT_BEGINNING, _ops.AT_BEGINNING_STRING):
            return place == 0
        if where in (_ops.AT_END, _ops.AT_END_STRING):
            return place == len(self._name)
        if where in (_ops.AT_BOUNDARY, _ops.AT_NON_BOUNDARY):
            sides = [_is_word(self._name[i : i + 1]) for i in (place - 1, place) if i >= 0]
            is_boundary = (len(sides) == 2 and sides[0]) != sides[-1]
            return bool(is_boundary == (where is _ops.AT_BOUNDARY))
        raise _not_taken(str(where))


def _is_in(part: tuple[Any, Any], character: str) -> bool:
    """Whether a part of one character is this one."""
    op, argument = part
    if op is _ops.LITERAL:
        return ord(character) == int(argument)
    if op is _ops.NOT_LITERAL:
        return ord(character) != int(argument)
    if op is _ops.ANY:
        return character != "\n"
    if op is _ops.RANGE:
        first, last = argument
        return int(first) <= ord(character) <= int(last)
    if op is _ops.CATEGORY:
        return _is_of(str(argument), character)
    if op is _ops.IN:
        is_negated = argument[0][0] is _ops.NEGATE
        own = argument[1:] if is_negated else argument
        return any(_is_in(one, character) for one in own) != is_negated
    raise AssertionError(op)


def _is_of(category: str, character: str) -> bool:
    kind = category.removeprefix("CATEGORY_")
    holds = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}
    return holds[kind.removeprefix("NOT_")](character) != kind.startswith("NOT_")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
