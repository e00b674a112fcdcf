"""Python runs this before a program, as `sitecustomize`: the C functions of cuda.bindings.runtime
hold NVIDIA's runtime without its symbols, but tell where they are once their module is there. Then
the stand-in takes their place. It imports nothing from its package."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HELD_BY = "cuda.bindings._internal.runtime"


def redirect(module: ModuleType) -> None:
    """Lead each function `_cuda...` of the module to the stand-in's."""
    stand_in, python = ctypes.CDLL(None), ctypes.pythonapi
    name_of, address_of = python.PyCapsule_GetName, python.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address_of.restype, address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    for name, capsule in getattr(module, "__pyx_capi__", {}).items():
        if name.startswith("_cuda"):
            address = ctypes.c_void_p(address_of(capsule, name_of(capsule)))
            stand_in.warpcheck_redirect(name[1:].encode(), address)


class Finder:
    """Finds that module as Python does, and redirects it behind its execution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As importlib's finders."""
        spec = PathFinder.find_spec(name, path) if name == HELD_BY else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_redirect(module: ModuleType) -> None:
            execute(module)
            redirect(module)

        spec.loader.exec_module = execute_and_redirect  # type: ignore[method-assign]
        return spec


def install(module: ModuleType) -> None:
    """Put the finder first, and run the `sitecustomize` that the module hides.

    Args:
        module: this one, by that name.
    """
    sys.meta_path.insert(0, Finder())
    folder = Path(str(module.__file__)).parent
    sys.path[:] = [path for path in sys.path if Path(path) != folder]
    del sys.modules[module.__name__]
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(module.__name__)
    sys.modules.setdefault(module.__name__, module)


if __name__ == "sitecustomize":
    install(sys.modules[__name__])
