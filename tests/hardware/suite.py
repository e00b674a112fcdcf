"""All cases, by family."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from .case import Case

FOLDER = Path(__file__).parent / "cases"


@cache
def families() -> dict[str, list[Case]]:
    found = {}
    for file in sorted(FOLDER.glob("*.py")):
        family = importlib.import_module(f".cases.{file.stem}", __package__).FAMILY
        found[family.name] = family.cases
    return found


@cache
def all_cases() -> dict[str, Case]:
    return {case.name: case for cases in families().values() for case in cases}
