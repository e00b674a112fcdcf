"""Compiles CUDA C++ with NVRTC for a named architecture, present on this machine or not.

cuda.core's Program returns one of cubin and PTX per compile; NVRTC makes both at once, so this
module talks to cuda.bindings and takes cubin, PTX and log from a single run of the compiler.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from deep_moe.errors import CompileError, MissingPackageError

from .precompiled_headers import PrecompiledHeaders

# CUTLASS leaves functions unannotated, which are host functions unless -default-device is given.
# -no-cache: with a driver present NVRTC keeps results of its own, and a kept one has no log.
# -v makes ptxas report registers and spills; Config members that one kernel does not use and
# cute's unused helpers would each give warning 177.
COMPILE_OPTIONS = (
    "-std=c++20",
    "-default-device",
    "-lineinfo",
    "-no-cache",
    "--ptxas-options=-v",
    "-diag-suppress=177",
)


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


@dataclass(frozen=True)
class _Run:
    """Of the compiler. failure: its name for it; contents: the results, in the order asked for."""

    failure: str | None
    contents: list[bytes]
    log: str

    @property
    def succeeded(self) -> bool:
        return self.failure is None


_precompiled_headers = PrecompiledHeaders()


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
    results, log = _compile(source, arch, include_paths, kernel, context, ("CUBIN", "PTX"))
    cubin, ptx = results
    return Compilation(cubin, _decoded(ptx), log, parse_resources(log, kernel))


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

    It is all that the emulator needs. `kernel` names the source in messages. options: NVRTC's, such
    as "-DNUM=4", "--pre-include=FILE" or "-std=c++17"; they come behind COMPILE_OPTIONS, and of two
    that name one thing theirs holds. headers: text by the name in `#include`; it goes before what
    the folders have. Raises CompileError with NVRTC's log, ValueError for an option that is no
    string.
    """
    for option in options:
        if not isinstance(option, str) or isinstance(options, str):
            raise ValueError(f"options must be a sequence of strings; got {options!r}")
    virtual = arch.replace("sm_", "compute_", 1)
    (ptx,), _ = _compile(
        source, virtual, include_paths, kernel, context, ("PTX",), options, headers or {}
    )
    return _decoded(ptx)


def options_with(more: Sequence[str] = ()) -> list[str]:
    """Every option that NVRTC is given, but for the architecture and the folders of headers."""
    # NVRTC refuses an option that is given twice.
    replaced = {option.partition("=")[0] for option in more}
    own = [o for o in COMPILE_OPTIONS if o.partition("=")[0] not in replaced]
    return [*own, *more]


def _compile(
    source: str,
    arch: str,
    include_paths: Sequence[Path],
    kernel: str,
    context: str,
    results: Sequence[str],
    more_options: Sequence[str] = (),
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[bytes], str]:
    """The results that are asked for by NVRTC's names, and the log."""
    nvrtc = _load_nvrtc()
    options = [f"--gpu-architecture={arch}", *options_with(more_options)]
    options += [f"-I{path}" for path in include_paths]
    # An absolute name keeps the working folder of this process out of the PTX.
    name = f"/deep_moe/{kernel}.cu"

    def run(options: Sequence[str]) -> _Run:
        program = _checked(
            nvrtc,
            nvrtc.nvrtcCreateProgram(
                source.encode(),
                name.encode(),
                len(headers),
                [text.encode() for text in headers.values()],
                [header.encode() for header in headers],
            ),
        )
        try:
            encoded = [option.encode() for option in options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = _decoded(_content(nvrtc, program, "ProgramLog"))
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                return _Run(status.name, [], log)
            return _Run(None, [_content(nvrtc, program, what) for what in results], log)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    last = _precompiled_headers.compile(source, options, run)
    if not last.succeeded:
        raise CompileError(
            f"NVRTC could not compile {kernel} for {arch} ({last.failure})\n"
            f"options: {' '.join(options)}\n{context}\n{last.log}"
        )
    return last.contents, last.log


def compiler_version() -> str:
    """Names the NVRTC in use, for the cache key.

    The package's metadata is asked first: loading the library costs 0.1 s, which a cached kernel
    does not need.
    """
    try:
        return f"nvidia-cuda-nvrtc {importlib.metadata.version('nvidia-cuda-nvrtc')}"
    except importlib.metadata.PackageNotFoundError:
        major, minor = nvrtc_version()
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "libnvrtc").resolve()
        return f"nvrtc {major}.{minor} {library.name}"


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the CUDA that the NVRTC in use is of."""
    nvrtc = _load_nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return major, minor


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


def _load_nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingPackageError(
            "cuda.bindings is not installed; run: pip install 'cuda-bindings>=13'"
        ) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings load the library on first use
        raise MissingPackageError(
            "the NVRTC library is not installed; run: pip install 'nvidia-cuda-nvrtc>=13'"
        ) from error
    return nvrtc


def _checked(nvrtc: ModuleType, answer: tuple[Any, ...]) -> Any:
    """Unpack a binding's (status, values...) tuple, raising on a status other than success."""
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC call failed: {status.name}")
    return values[0] if len(values) == 1 else values


def _content(nvrtc: ModuleType, program: Any, what: str) -> bytes:
    size = _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    content = bytearray(size)
    status = getattr(nvrtc, f"nvrtcGet{what}")(program, content)
    _checked(nvrtc, (*status, None))
    return bytes(content)


def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")
