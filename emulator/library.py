"""Builds the emulator's shared library with one C++ compiler and loads it.

A wheel carries the library beside this file. A source checkout builds it on first use into its
build folder, under a name made of a digest of the sources, so that an edit is a new library. The
module imports nothing from its package: the build of a wheel loads it alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY_NAME = "libwarpcheck.so"
SOURCES = Path(__file__).parent / "src"
EXPORTED_NAMES = SOURCES / "exported_names.map"
# The stand-in for CUDA's driver, over this library; it lies in a folder beside it.
STAND_IN_NAME = "libcuda.so.1"
STAND_IN_SOURCES = Path(__file__).parent / "cuda" / "src"
CHECKOUT_BUILDS = Path(__file__).parents[1] / "build" / "emulator"

# No flag that depends on the building machine: hot loops choose their instructions at load time.
# Results have the same bits on every processor: nothing is fused, and `char` has a sign.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fsigned-char",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-format-security",
)
# The C++ library is linked in, for that of another machine may be older. libgcc comes from that
# machine: each finds its handlers of exceptions by means of the glibc that it was built for. Unused
# parts go: the C++ library's random numbers alone need glibc 2.36.
LINK_FLAGS = ("-shared", "-static-libstdc++", "-Wl,--gc-sections")
NUM_COMPILERS = 2


class LibraryError(OSError):
    """The library cannot be built or loaded."""


def build(output: Path, *, kept_units: Path | None = None) -> None:
    """Compile the sources into the shared library `output`.

    kept_units: folder of compiled units, by digest; what is there is not compiled again.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
        units = compile_units(SOURCES.glob("*.cpp"), kept_units or Path(folder))
        linked = Path(folder) / LIBRARY_NAME
        link(units, linked, (*LINK_FLAGS, f"-Wl,--version-script={EXPORTED_NAMES}"))
        linked.replace(output)


def build_stand_in(output: Path, *, library: Path, kept_units: Path | None = None) -> None:
    """Compile the stand-in for CUDA's driver into the shared library `output`.

    library: the emulator's, which lies in the folder above that of `output`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
        headers = f"-DHEADERS={source_digest('*.h', STAND_IN_SOURCES)}"
        units = compile_units(
            [*STAND_IN_SOURCES.glob("*.cpp"), SOURCES / "glibc_2_28.cpp"],
            kept_units or Path(folder),
            ("-I", str(STAND_IN_SOURCES), headers),
        )
        linked = Path(folder) / STAND_IN_NAME
        versions = STAND_IN_SOURCES / "versions.map"
        names = (f"-Wl,--version-script={versions}", "-Wl,--exclude-libs,ALL")
        # Before programs and their libraries begin, their calls have to lead here.
        order = ("-Wl,-z,initfirst", f"-Wl,-soname,{STAND_IN_NAME}")
        emulator = (f"-L{library.parent}", f"-l:{library.name}", "-Wl,-rpath,$ORIGIN/..")
        link(units, linked, (*LINK_FLAGS, *names, *order), emulator)
        linked.replace(output)


def compile_units(
    sources: Iterable[Path], kept_units: Path, more_flags: tuple[str, ...] = ()
) -> list[Path]:
    """The sources as compiled units in the folder `kept_units`, by digest: what is there is not
    compiled again."""
    compiler = find_compiler()
    kept_units.mkdir(parents=True, exist_ok=True)
    headers = source_digest("*.h")

    def compile_unit(source: Path) -> Path:
        content = source.read_bytes() + " ".join(more_flags).encode()
        unit = kept_units / f"{headers}-{hashlib.sha256(content).hexdigest()[:16]}.o"
        if not unit.exists():
            with tempfile.TemporaryDirectory(dir=kept_units, prefix=".unit-") as folder:
                built = Path(folder) / unit.name
                includes = ("-I", str(SOURCES), "-c", str(source), "-o", str(built))
                _run([compiler, *FLAGS, *more_flags, *includes])
                built.replace(unit)
        return unit

    # The largest first, so that no long one runs alone at the end.
    in_order = sorted(sources, key=lambda s: -s.stat().st_size)
    with ThreadPoolExecutor(NUM_COMPILERS) as pool:
        return list(pool.map(compile_unit, in_order))


def link(
    units: list[Path], output: Path, flags: tuple[str, ...], libraries: tuple[str, ...] = ()
) -> None:
    _run([find_compiler(), *flags, *map(str, units), *libraries, "-o", str(output)])


def find_compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise LibraryError(
            "the emulator has to be compiled once and needs g++ 12 or newer: "
            "install it, or name a compiler in CXX"
        )
    return compiler


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise LibraryError(f"{' '.join(command)}\nfailed:\n{result.stderr}")


def source_digest(pattern: str = "*.*", sources: Path = SOURCES) -> str:
    """Digest of the processor, all flags and the sources whose names match."""
    digest = hashlib.sha256(" ".join((platform.machine(), *FLAGS, *LINK_FLAGS)).encode())
    for source in sorted(sources.glob(pattern)):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """The library, built if it is not there yet."""
    packaged = Path(__file__).parent / LIBRARY_NAME
    if packaged.exists():
        return packaged
    built = CHECKOUT_BUILDS / source_digest() / LIBRARY_NAME
    if not built.exists():
        # Processes that build at the same time make the same file; the last rename wins.
        build(built, kept_units=CHECKOUT_BUILDS / "units")
    return built


def stand_in_path() -> Path:
    """The stand-in for CUDA's driver, built if it is not there yet."""
    packaged = STAND_IN_SOURCES.parent / STAND_IN_NAME
    if packaged.exists():
        return packaged
    library = library_path()
    folder = f"cuda-{source_digest(sources=STAND_IN_SOURCES)}"
    built = library.parent / folder / STAND_IN_NAME
    if not built.exists():
        build_stand_in(built, library=library, kept_units=CHECKOUT_BUILDS / "units")
    return built


@functools.cache
def load() -> ctypes.CDLL:
    """The library with the types of its functions declared."""
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"cannot load the emulator's library {path}: {error}") from error
    handle, u32, u64, integer, text = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_char_p,
    )
    three, u32_out, u64_out = u32 * 3, ctypes.POINTER(u32), ctypes.POINTER(u64)
    signatures = {
        "dm_create": (handle, [u64, integer, integer]),
        "dm_destroy": (None, [handle]),
        "dm_error": (text, [handle]),
        "dm_error_finding": (text, [handle]),
        "dm_set_memory_limit": (None, [handle, u64]),
        "dm_set_residency": (None, [handle, u32]),
        "dm_set_hopper_fp8_sums": (None, [handle, integer]),
        "dm_set_strict_tcgen05": (None, [handle, integer]),
        "dm_set_schedule": (None, [handle, integer]),
        "dm_set_collects_findings": (None, [handle, integer]),
        "dm_num_findings": (u32, [handle]),
        "dm_finding": (text, [handle, u32]),
        "dm_add_memory": (integer, [handle, u32, u64, u64, text, integer]),
        "dm_name_memory": (integer, [handle, u32, u64, text, u64, u64, u64_out, u32]),
        "dm_remove_memory": (integer, [handle, u32, u64]),
        "dm_load": (integer, [handle, text, u64, text, u32_out]),
        "dm_set_line_costs": (
            integer,
            [handle, u32, text, u64, u32_out, ctypes.POINTER(ctypes.c_double)],
        ),
        "dm_unload": (None, [handle, u32]),
        "dm_kernel": (integer, [handle, u32, text, u32_out, u32_out, three]),
        "dm_kernels": (text, [handle, u32]),
        "dm_kernel_parameter": (
            integer,
            [handle, u32, text, u32, u32_out, u32_out, ctypes.POINTER(integer)],
        ),
        "dm_variable": (integer, [handle, u32, u32, text, u64_out, u64_out]),
        "dm_launch": (
            integer,
            [handle, u32, text, u32, three, three, three, u32, text, u64, integer, u32],
        ),
        "dm_name_shared": (integer, [handle, text, u64, u64, u64_out, u32]),
        "dm_withdraw_launch": (None, [handle]),
        "dm_name_warps": (integer, [handle, text, u32_out, u32]),
        "dm_stall": (text, [handle]),
        "dm_statistics": (None, [handle, u64_out, u64_out, u64_out]),
        "dm_supported_instructions": (text, []),
        "dm_set_clock": (integer, [handle, text, integer]),
        "dm_leave_out_products": (None, [handle, integer]),
        "dm_chip_parameters": (text, []),
        "dm_launch_times": (text, [handle]),
        "dm_usage": (text, [handle]),
        "dm_num_waits": (u64, [handle]),
        "dm_fence": (None, []),
        "dm_waits": (None, [handle, ctypes.POINTER(ctypes.c_int64)]),
        "dm_set_home": (None, [handle, u32, u64, integer]),
        "dm_add_multicast": (integer, [handle, u32, u64, u64, text, u64_out, u32]),
        "dm_mirror_memory": (integer, [handle, u32, u64, u64, u64, u64, u64_out, u32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


@functools.cache
def interruptible_run() -> Callable[[int | None, Callable[[], None] | None], int]:
    """The library's `dm_run`, which lets signals be handled while it runs: it is called with the
    interpreter's lock held and gives that up itself. Takes a machine's handle, and what to call now
    and then; raises what that or a signal's handler raises.
    """
    functions = [
        ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p)
        for name in (
            "PyEval_SaveThread",
            "PyEval_RestoreThread",
            "PyErr_CheckSignals",
            "PyObject_CallNoArgs",
            "Py_DecRef",
        )
    ]
    table = (ctypes.c_void_p * len(functions))(*(function.value for function in functions))
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    dm_run = prototype(("dm_run", load()))

    def run(handle: int | None, progress: Callable[[], None] | None) -> int:
        # The address of a Python object is its id.
        return dm_run(handle, table, None if progress is None else id(progress))

    return run
