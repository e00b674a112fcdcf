"""Makes a source checkout importable, where jit, heuristics and emulator lie beside this folder.

Installed, they are inside it. An entry of the package's `__path__` for the whole checkout would
make packages of `tests`, `docs` and every other folder too; this one holds these three alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

PARTS = ("emulator", "heuristics", "jit")


class CheckoutFinder:
    """Finds the parts in the checkout's folder, and nothing else. No subclass: pkgutil would list
    the whole folder of a FileFinder."""

    def __init__(self, root: Path) -> None:
        self._folder = FileFinder(str(root), (SourceFileLoader, SOURCE_SUFFIXES))

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.rpartition(".")[2] not in PARTS:
            return None
        return self._folder.find_spec(fullname, target)

    def invalidate_caches(self) -> None:
        self._folder.invalidate_caches()

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """For pkgutil: names, and that they are packages."""
        for name in PARTS:
            yield prefix + name, True


def path_entry(root: Path) -> str:
    """What to add to the package's `__path__`. No such folder exists: a hook stands for it."""
    entry = str(root / f"{{{','.join(PARTS)}}}")

    def hook(path: str) -> CheckoutFinder:
        if path != entry:
            raise ImportError(f"only for {entry}")
        return CheckoutFinder(root)

    sys.path_hooks.append(hook)
    return entry
