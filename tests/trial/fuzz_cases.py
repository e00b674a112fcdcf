"""Fuzz cases by what they are to be."""

from __future__ import annotations

from typing import Any, TypeVar

from deep_moe.trial.fuzzing import FuzzCase

Kind = TypeVar("Kind", bound=FuzzCase)


def with_values(kind: type[Kind], **wanted: Any) -> Kind:
    """The first case that has them, of its axes and arch."""
    return next(
        case
        for case in map(kind.of, range(100_000))
        if all({**case.values, "arch": case.arch}[axis] == value for axis, value in wanted.items())
    )
