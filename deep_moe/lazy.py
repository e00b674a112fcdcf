"""Packages whose public names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def names_on_use(
    package: str, modules: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    modules: the module of each public name, from the package on. No module may have the name of
    what it is listed for: importing it makes the module itself an attribute of the package.
    submodules: modules that are public names themselves.
    """

    def find(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f".{name}", package)  # which sets the attribute
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        special = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*modules, *submodules, *special})

    return find, names
