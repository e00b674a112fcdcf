"""Compiles CUDA C++ with NVRTC for a named architecture, present on this machine or not.

cuda.core's Program returns one of cubin and PTX per compile and asks for a driver; NVRTC makes both
at once, so this module talks to cuda.bindings and takes what is asked for, and the log, from a
single run of the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import CompileError, MissingPackageError
from .precompiled_headers import PrecompiledHeaders

# CUTLASS leaves functions unannotated, which are host functions unless -default-device is given.
# -no-cache: with a driver present NVRTC keeps results of its own, and a kept one has no log.
# -v makes ptxas report registers and spills; members of a config that one kernel does not use and
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
class _Run:
    """Of the compiler. failure: its name for it; contents: the results, in the order asked for."""

    failure: str | None
    contents: list[bytes]
    log: str

    @property
    def succeeded(self) -> bool:
        return self.failure is None


_precompiled_headers = PrecompiledHeaders()


def compile_to_ptx(
    source: str,
    *,
    arch: str,
    include_paths: Sequence[Path] = (),
    name: str = "/kernel.cu",
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> str:
    """The PTX of CUDA C++, as `Machine.load` takes it. No GPU is needed, and no driver.

    Args:
        source: the text.
        arch: what to compile for, such as "sm_90a" or "sm_100a".
        include_paths: folders of headers.
        name: of the source, in messages and findings.
        options: NVRTC's, such as "-DNUM=4", "--pre-include=FILE" or "-std=c++17". They come behind
            COMPILE_OPTIONS, and of two that name one thing theirs holds.
        headers: text by the name in `#include`. It goes before what the folders have.

    Raises:
        CompileError: NVRTC refused the source; the text has its log.
        MissingPackageError: NVRTC is not installed.
        ValueError: an option that is no string.
    """
    (ptx,), _ = compile_results(
        source,
        ("PTX",),
        arch=arch.replace("sm_", "compute_", 1),
        include_paths=include_paths,
        name=name,
        options=options,
        headers=headers,
    )
    return decoded(ptx)


def options_with(more: Sequence[str] = ()) -> list[str]:
    """Every option that NVRTC is given, but for the architecture and the folders of headers."""
    # NVRTC refuses an option that is given twice.
    replaced = {option.partition("=")[0] for option in more}
    own = [o for o in COMPILE_OPTIONS if o.partition("=")[0] not in replaced]
    return [*own, *more]


def compile_results(
    source: str,
    results: Sequence[str],
    *,
    arch: str,
    include_paths: Sequence[Path] = (),
    name: str = "/kernel.cu",
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> tuple[list[bytes], str]:
    """The results that are asked for by NVRTC's names ("CUBIN", "PTX"), and the log; all else as
    in `compile_to_ptx`."""
    for option in options:
        if not isinstance(option, str) or isinstance(options, str):
            raise ValueError(f"options must be a sequence of strings; got {options!r}")
    headers = headers or {}
    nvrtc = load_nvrtc()
    all_options = [f"--gpu-architecture={arch}", *options_with(options)]
    all_options += [f"-I{path}" for path in include_paths]

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
            log = decoded(_content(nvrtc, program, "ProgramLog"))
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                return _Run(status.name, [], log)
            return _Run(None, [_content(nvrtc, program, what) for what in results], log)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    last = _precompiled_headers.compile(source, all_options, run)
    if not last.succeeded:
        raise CompileError(
            f"NVRTC could not compile {name} for {arch} ({last.failure})\n"
            f"options: {' '.join(all_options)}\n{last.log}"
        )
    return last.contents, last.log


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the CUDA that the NVRTC in use is of."""
    nvrtc = load_nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return major, minor


def load_nvrtc() -> ModuleType:
    """cuda.bindings.nvrtc, whose library loads. Raises MissingPackageError."""
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


def decoded(text: bytes) -> str:
    """A result of NVRTC's as text."""
    return text.rstrip(b"\0").decode(errors="replace")


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
