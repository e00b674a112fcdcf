"""The examples in docstrings hold: of every module, and of functions that keep their results, which
doctest by itself does not see."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "deep_moe": "deep_moe",
    "deep_moe.emulator": "emulator",
    "deep_moe.heuristics": "heuristics",
    "deep_moe.jit": "jit",
    "benchmarks": "benchmarks",
    "docs": "docs",
}


def modules_with_examples() -> Iterator[str]:
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(line.lstrip().startswith(">>> ") for line in path.read_text().splitlines()):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join((package, *(part for part in parts if part != "__init__")))


def examples_of(module: ModuleType) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(module)
    for name, value in vars(module).items():
        function = getattr(value, "__wrapped__", None)
        if hasattr(value, "cache_info") and function.__module__ == module.__name__:
            found += finder.find(function, f"{module.__name__}.{name}", module, vars(module))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_hold(name: str) -> None:
    examples = examples_of(importlib.import_module(name))
    assert examples
    for test in examples:
        failed = doctest.DocTestRunner().run(test).failed
        assert failed == 0, f"{test.name}, line {test.lineno}: see what was printed"
