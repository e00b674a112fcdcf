"""Compiles kernels with NVRTC: cubin, PTX, log and resources from a single run of the compiler.

The run itself is `deep_moe.emulator.nvrtc`'s, which the emulator's users have without the rest."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deep_moe.emulator import errors, nvrtc
from deep_moe.errors import CompileError, MissingPackageError


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for a kernel: per thread, except shared memory."""

    num_registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class Compilation:
    """Everything that one run of NVRTC gives."""

    cubin: bytes
    ptx: str
    log: str
    resources: Resources


def compile_source(
    source: str,
    *,
    arch: str,
    include_paths: Sequence[Path] = (),
    kernel: str = "mega_moe_kernel",
    context: str = "",
) -> Compilation:
    """Compile `source` for `arch` (such as "sm_100a").

    `kernel` is the entry whose resources are reported, `context` is added to a CompileError.
    """
    with _own_errors(context):
        (cubin, ptx), log = nvrtc.compile_results(
            source, ("CUBIN", "PTX"), arch=arch, include_paths=include_paths, name=_name(kernel)
        )
    return Compilation(cubin, nvrtc.decoded(ptx), log, parse_resources(log, kernel))


def compile_to_ptx(
    source: str,
    *,
    arch: str,
    include_paths: Sequence[Path] = (),
    kernel: str = "kernel",
    context: str = "",
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> str:
    """The PTX that `compile_source` gives, without the time that ptxas takes for the cubin.

    It is all that the emulator needs. `kernel` names the source in messages; options and headers
    are those of `deep_moe.emulator.compile_to_ptx`. Raises CompileError with NVRTC's log,
    ValueError for an option that is no string.
    """
    with _own_errors(context):
        return nvrtc.compile_to_ptx(
            source,
            arch=arch,
            include_paths=include_paths,
            name=_name(kernel),
            options=options,
            headers=headers,
        )


def compiler_version() -> str:
    """Names the NVRTC in use, for the cache key.

    The package's metadata is asked first: loading the library costs 0.1 s, which a cached kernel
    does not need.
    """
    try:
        return f"nvidia-cuda-nvrtc {importlib.metadata.version('nvidia-cuda-nvrtc')}"
    except importlib.metadata.PackageNotFoundError:
        with _own_errors():
            major, minor = nvrtc.nvrtc_version()
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "libnvrtc").resolve()
        return f"nvrtc {major}.{minor} {library.name}"


def parse_resources(log: str, kernel: str) -> Resources:
    """Read ptxas's report on `kernel` from a compile log."""
    _, found, report = log.partition(f"Compiling entry function '{kernel}'")
    if not found:
        raise CompileError(f"ptxas did not report on an entry function {kernel!r}:\n{log}")
    report = report.split("Compiling entry function", 1)[0]

    def number(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match.group(1)) if match else 0

    return Resources(
        num_registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        static_smem_bytes=number(r"(\d+) bytes smem"),
    )


def _name(kernel: str) -> str:
    """Of a kernel's source. Absolute: that keeps the working folder of this process out of the
    PTX."""
    return f"/deep_moe/{kernel}.cu"


@contextmanager
def _own_errors(context: str = "") -> Iterator[None]:
    """What the compiler's wrapper raises, as errors of this package, with what the caller knows."""
    try:
        yield
    except errors.CompileError as error:
        raise CompileError(f"{context}\n{error}" if context else str(error)) from None
    except errors.MissingPackageError as error:
        raise MissingPackageError(str(error)) from error
