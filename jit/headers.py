"""Finds the C++ headers that a kernel is compiled against: ours, CUTLASS's and CUDA's.

Order of search: an explicit environment variable, then Python packages, then a CUDA toolkit.

| variable | points to |
|---|---|
| `DEEP_MOE_CUTLASS_INCLUDE` | CUTLASS's include folder (holds `cute/tensor.hpp`) |
| `CUTLASS_PATH` | a CUTLASS checkout (holds `include/cute/tensor.hpp`) |
| `CUDA_HOME`, `CUDA_PATH` | a CUDA toolkit, used where the packages lack a header |
| `DEEP_MOE_VALUES` | folders with formats of your own (deep_moe/axes.py) |
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deep_moe.axes import VALUES_VARIABLE, further_folders
from deep_moe.errors import MissingPackageError

_CUTLASS_PROBE = "cute/tensor.hpp"
_CUDA_PROBE = "cuda_fp8.h"
_CCCL_PROBE = "cccl/cuda/std/cstdint"


@dataclass(frozen=True)
class HeaderFolder:
    """One `-I` folder and the text that stands for its content in a cache key."""

    path: Path
    identity: str


@dataclass(frozen=True)
class Headers:
    """Where a kernel's headers come from. `cccl` is the folder that holds `cccl/`, `further` are
    those of formats that are not part of deep_moe (deep_moe/axes.py)."""

    library: HeaderFolder
    cutlass: HeaderFolder
    cuda: HeaderFolder
    cccl: HeaderFolder
    further: tuple[HeaderFolder, ...] = ()

    @property
    def include_paths(self) -> tuple[Path, ...]:
        # CUDA's own headers name those of CCCL without the folder `cccl`, CUTLASS's with it.
        paths = (
            self.library.path,
            *(folder.path for folder in self.further),
            self.cutlass.path,
            self.cuda.path,
            self.cccl.path / "cccl",
            self.cccl.path,
        )
        return tuple(dict.fromkeys(paths))

    @property
    def identities(self) -> tuple[str, ...]:
        folders = (self.library, *self.further, self.cutlass, self.cuda, self.cccl)
        return tuple(folder.identity for folder in folders)


def find_headers() -> Headers:
    """Locate every header folder. Raises MissingPackageError for the first that is not there."""
    cuda = _find_cuda("CUDA runtime headers", _CUDA_PROBE, "nvidia-cuda-runtime")
    cccl = _find_cuda("CUDA C++ core headers", _CCCL_PROBE, "nvidia-cuda-cccl")
    further = tuple(
        HeaderFolder(path, f"{VALUES_VARIABLE} {tree_digest(path)}")
        for path in (folder / "include" for folder in further_folders())
    )
    return Headers(find_library(), find_cutlass(), cuda, cccl, further)


def library_path() -> Path:
    """Our own headers: `include/` beside this package, in a checkout and when installed."""
    path = Path(__file__).resolve().parent.parent / "include"
    if not (path / "deep_moe").is_dir():
        raise MissingPackageError(
            f"deep_moe's own C++ headers are missing: {path / 'deep_moe'} does not exist; "
            "reinstall the package from its wheel: "
            "pip install --force-reinstall --no-deps deep_moe-*.whl"
        )
    return path


def find_library() -> HeaderFolder:
    """Our own headers."""
    path = library_path()
    return HeaderFolder(path, f"deep_moe {tree_digest(path)}")


def find_cutlass() -> HeaderFolder:
    for variable, suffix in (("DEEP_MOE_CUTLASS_INCLUDE", ""), ("CUTLASS_PATH", "include")):
        value = os.environ.get(variable)
        if value:
            path = Path(value, suffix).resolve()
            if not (path / _CUTLASS_PROBE).is_file():
                raise MissingPackageError(
                    f"{variable}={value} does not lead to CUTLASS: {path / _CUTLASS_PROBE} does "
                    "not exist; correct it, or unset it and run: pip install nvidia-cutlass"
                )
            # A checkout may change without its version: so the files count, not read (700 of them).
            return HeaderFolder(path, f"cutlass {_cutlass_version(path)} {path} {_stamp(path)}")
    # find_spec does not import the package, which would take a second.
    spec = importlib.util.find_spec("cutlass_library")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location, "source", "include")
        if (path / _CUTLASS_PROBE).is_file():
            return HeaderFolder(path, f"cutlass {_cutlass_version(path)}")
    raise MissingPackageError(
        "CUTLASS headers are not installed; run: pip install nvidia-cutlass "
        "(or point DEEP_MOE_CUTLASS_INCLUDE to a CUTLASS include folder)"
    )


def tree_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of every file below `folder`."""
    # Of every kernel that is looked for. pathlib would take three times as long, 18 ms.
    digest = hashlib.sha256()
    root = os.path.join(folder, "")
    files = (os.path.join(where, name) for where, _, names in os.walk(root) for name in names)
    for path in sorted(file.removeprefix(root) for file in files if os.path.isfile(file)):
        content = _content(root + path)
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _stamp(folder: Path) -> str:
    """Changes with a file's name, size or time of change below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        status = path.stat()
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _find_cuda(what: str, probe: str, package: str) -> HeaderFolder:
    for path, from_package in _cuda_include_folders():
        if (path / probe).is_file():
            if from_package:
                return HeaderFolder(path, f"{package} {_package_version(package)}")
            return HeaderFolder(path, f"{package} toolkit {path.resolve()} {_cuda_version(path)}")
    raise MissingPackageError(
        f"{what} ({probe}) are not installed; run: pip install '{package}>=13' "
        "(or set CUDA_HOME to a CUDA toolkit)"
    )


def _cuda_include_folders() -> Iterator[tuple[Path, bool]]:
    """Folders that may hold CUDA headers, best first, and whether a Python package owns them."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(location, "cu13", "include"), True
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield Path(root, "include"), False


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unversioned"  # headers unpacked without package metadata


def _cutlass_version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text()
    parts = (
        re.search(rf"#define CUTLASS_{name} +(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")
    )
    return ".".join(match.group(1) if match else "?" for match in parts)


def _cuda_version(include: Path) -> str:
    """CUDA_VERSION of the toolkit that `include` belongs to."""
    header = include / "cuda.h"
    if header.is_file():
        match = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace"))
        if match:
            return match.group(1)
    return "unversioned"
