"""Runs an example program of the CUTLASS package: host side compiled by a plain C++ compiler,
kernels compiled by NVRTC, both from the installed files, launches executed by the emulator.

The host side is the whole file, untouched; `host/` holds a CUDA runtime that calls back here. The
kernels are what the file holds before its host functions. Compiled files stay in the build folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock

from deep_moe.emulator import Finding, Machine
from deep_moe.jit.headers import find_headers
from deep_moe.jit.nvrtc import compiler_version

HERE = Path(__file__).parent
BUILDS = Path(__file__).parents[3] / "build" / "cutlass-examples"


def package_folder() -> Path:
    spec = importlib.util.find_spec("cutlass_library")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "source"


# Headers that no example needs here and that hold what one of the compilers cannot read: warp-level
# MMA of older GPUs, whose CUDA part is in a package of its own.
UNUSED_HEADERS = {
    "crt/mma.h": "",
    # Others rely on what it includes.
    "cutlass/arch/wmma.h": '#include "cutlass/arch/mma.h"\n#include "cutlass/gemm/gemm.h"\n',
}

# What kernels do not need besides, and NVRTC cannot compile.
HOST_HEADERS = (
    "iostream",
    "cstdio",
    "cstdlib",
    "cassert",
    "thrust/host_vector.h",
    "thrust/device_vector.h",
    "cutlass/cluster_launch.hpp",
    "cutlass/util/GPU_Clock.hpp",
    "cutlass/util/command_line.h",
    "cutlass/util/distribution.h",
    "cutlass/util/helper_cuda.hpp",
    "cutlass/util/host_tensor.h",
    "cutlass/util/packed_stride.hpp",
    "cutlass/util/print_error.hpp",
    "cutlass/util/reference/device/gemm.h",
    "cutlass/util/reference/device/tensor_compare.h",
    "cutlass/util/reference/device/tensor_fill.h",
    "cutlass/util/reference/host/gett.hpp",
    "cutlass/util/reference/host/tensor_compare.h",
    "cutlass/util/reference/host/tensor_copy.h",
    "cutlass/util/reference/host/tensor_fill.h",
    "cutlass/util/reference/host/tensor_norm.h",
    "cutlass/util/tensor_view_io.h",
    "example_utils.hpp",
    "helper.h",
    "hopper_fp8_commandline.hpp",
)

# CUTLASS leaves these out under NVRTC. They stand in for the header that follows them in the
# examples, which is for the host.
SM100_BUILDERS = """
#include "cute/atom/copy_traits_sm100_tma.hpp"
#include "cutlass/gemm/collective/sm100_mma_warpspecialized.hpp"
#include "cutlass/gemm/collective/sm100_blockscaled_mma_warpspecialized.hpp"
#include "cutlass/gemm/collective/builders/sm100_umma_builder.inl"
#include "cutlass/gemm/collective/builders/sm100_blockscaled_umma_builder.inl"
"""


@dataclass(frozen=True)
class Example:
    """A file below the package's examples/ folder.

    host_starts_at: the text at which its kernels end. kernel: the launched kernel as a C++
    expression, by default that of the launched function's symbol.
    """

    path: str
    arch: str
    host_starts_at: str
    kernel: str | None = None


@dataclass
class Launch:
    """One launch as it ran: each allocation's bytes before and after, and what the checks found."""

    kernel: str
    grid: tuple[int, ...]
    cluster: tuple[int, ...]
    before: list[np.ndarray] = field(default_factory=list)
    after: list[np.ndarray] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def run(example: Example, *arguments: int | str, seed: int = 0) -> tuple[int, list[Launch]]:
    """The program's exit status and its launches, of which the first is executed."""
    library_path, symbols = host_side(example)
    # A copy is loaded anew: programs keep their tensors in variables, and memory with them.
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(shutil.copy(library_path, folder))
    allocations: list[tuple[int, int]] = []
    launches: list[Launch] = []
    failures: list[BaseException] = []

    def snapshot() -> list[np.ndarray]:
        return [
            np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8)
            for address, num_bytes in allocations
        ]

    def launch(
        offset: int,
        grid: ctypes.Array[ctypes.c_uint32],
        block: ctypes.Array[ctypes.c_uint32],
        cluster: ctypes.Array[ctypes.c_uint32],
        shared_bytes: int,
        values: ctypes.Array[ctypes.c_void_p],
    ) -> int:
        if launches or failures:
            return not failures  # all further ones are for timing
        try:
            kernel = example.kernel or template_id(symbols[offset])
            ptx, entry = device_side(example, kernel)
            machine = Machine(seed=seed, stop_at_findings=False)
            for index, (address, num_bytes) in enumerate(allocations):
                if num_bytes:
                    machine.add_memory(0, address, num_bytes, f"allocation {index}")
            record = Launch(kernel, tuple(grid[:3]), tuple(cluster[:3]), snapshot())
            machine.launch(
                machine.load(ptx, name=example.path),
                entry,
                grid=tuple(grid[:3]),
                block=tuple(block[:3]),
                cluster=tuple(cluster[:3]),
                shared_bytes=shared_bytes,
                args=[
                    ctypes.string_at(values[index], num_bytes)
                    for index, num_bytes in enumerate(parameter_sizes(ptx, entry))
                ],
            )
            machine.run()
            record.after = snapshot()
            record.findings = machine.findings
            launches.append(record)
        except BaseException as error:
            failures.append(error)
            return 0
        return 1

    three = ctypes.POINTER(ctypes.c_uint32)
    launch_callback = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_uint64,
        three,
        three,
        three,
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.c_void_p),
    )(launch)
    allocation_callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(
        lambda address, num_bytes: allocations.append((address, num_bytes))
    )
    words = [b"example", *(str(a).encode() for a in arguments)]
    main = next(name for name in symbols.values() if name.startswith("_Z12example_main"))
    status = library.run_example(
        library[main],
        len(words),
        (ctypes.c_char_p * len(words))(*words),
        allocation_callback,
        launch_callback,
    )
    if failures:
        raise failures[0]
    return status, launches


def host_side(example: Example) -> tuple[Path, dict[int, str]]:
    """The example's program as a shared library, and its functions' mangled names by offset."""
    source = package_folder() / "examples" / example.path
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "the emulator was built with it"
    headers = find_headers()
    package = package_folder()
    includes = [
        HERE / "host",
        package / "include",
        package / "tools/util/include",
        package / "examples/common",
        headers.cuda.path,
        headers.cccl.path / "cccl",
    ]
    flags = [
        *("-std=c++17", "-O1", "-w", "-Wno-psabi", "-fpermissive", "-fPIC", "-shared", "-x", "c++"),
        "-Wl,--wrap=exit",
        *("-include", "prelude.h"),
        # What nvcc's host pass would say of itself.
        *("-D__CUDACC_VER_MAJOR__=13", "-D__CUDACC_VER_MINOR__=0"),
        "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1",
        f"-DDEVICE_MAJOR={10 if example.arch == 'sm_100a' else 9}",
    ]
    ours = [path.read_bytes() for path in sorted((HERE / "host").rglob("*.*"))]
    key = digest(source.read_bytes(), *ours, repr((flags, UNUSED_HEADERS)).encode())

    def build(folder: Path) -> None:
        for name, content in UNUSED_HEADERS.items():
            (folder / "headers" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "headers" / name).write_text("#pragma once\n" + content)
        subprocess.run(
            [
                compiler,
                *flags,
                *(f"-I{path}" for path in (folder / "headers", *includes)),
                *(str(HERE / "host" / "runtime.cpp"), str(source)),
                *("-o", str(folder / "host.so")),
            ],
            check=True,
        )

    library = kept(f"{source.stem}-host-{key}", build) / "host.so"
    listing = subprocess.run(
        ["nm", "--defined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    rows = (line.split() for line in listing.splitlines())
    return library, {int(row[0], 16): row[2] for row in rows if row[1] in "tTwW"}


def device_side(example: Example, kernel: str) -> tuple[str, str]:
    """PTX of one kernel, and the kernel's name there."""
    source = package_folder() / "examples" / example.path
    text, found, _ = source.read_text().partition(example.host_starts_at)
    assert found, f"{example.path} has no line {example.host_starts_at!r}"
    prelude = (HERE / "device" / "prelude.h").read_bytes()
    key = digest(
        source.read_bytes(),
        prelude,
        repr((example, kernel, compiler_version(), replaced_headers())).encode(),
    )

    def build(folder: Path) -> None:
        ptx, entry = compile_kernel(text, example, kernel)
        (folder / "kernel.ptx").write_text(ptx)
        (folder / "entry").write_text(entry)

    folder = kept(f"{source.stem}-device-{key}", build)
    return (folder / "kernel.ptx").read_text(), (folder / "entry").read_text()


def replaced_headers() -> dict[str, str]:
    """What NVRTC gets instead of some headers, by name. No code that runs on a device changes."""

    def text(header: str) -> str:
        return (package_folder() / "include" / header).read_text()

    tensor_copies, descriptors = (
        "cute/atom/copy_traits_sm100_tma.hpp",
        "cute/arch/copy_sm90_desc.hpp",
    )
    return {
        **UNUSED_HEADERS,
        **dict.fromkeys(HOST_HEADERS, ""),
        "cutlass/gemm/device/gemm_universal_adapter.h": SM100_BUILDERS,
        # Types of kernel parameters are those of functions that this header keeps from NVRTC.
        tensor_copies: re.sub(
            r"#if !defined\(__CUDACC_RTC__\)\n(?!#include)|CUTE_HOST$",
            lambda found: "#if 1\n" if found[0].startswith("#") else "CUTE_HOST_RTC",
            text(tensor_copies),
            flags=re.M,
        ),
        # Under NVRTC a tensor map is aligned as CUDA 12's was, so that parameters would be laid out
        # unlike the host's.
        descriptors: text(descriptors).replace("alignas(64)", "alignas(128)"),
    }


def compile_kernel(text: str, example: Example, kernel: str) -> tuple[str, str]:
    """NVRTC's PTX for `kernel`, a C++ expression, and the name it has there."""
    from cuda.bindings import nvrtc

    # The cut leaves conditionals open.
    text += "#endif\n" * (len(re.findall(r"^#if", text, re.M)) - text.count("#endif"))
    replaced = replaced_headers()
    names = [name.encode() for name in replaced]
    contents = [b"#pragma once\n" + content.encode() for content in replaced.values()]
    headers = find_headers()
    options = [
        f"--gpu-architecture={example.arch.replace('sm', 'compute')}",
        *("-std=c++17", "-default-device", "-w", "-lineinfo", "-no-cache"),
        f"--pre-include={HERE / 'device' / 'prelude.h'}",
        *(f"-I{path}" for path in headers.include_paths),
    ]
    status, program = nvrtc.nvrtcCreateProgram(
        text.encode(), b"example.cu", len(names), contents, names
    )
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    nvrtc.nvrtcAddNameExpression(program, kernel.encode())
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()[:10000]
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    _, entry = nvrtc.nvrtcGetLoweredName(program, kernel.encode())
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0").decode(), entry.decode()


def kept(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the build folder, filled by `build` once by all processes together."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    folder = BUILDS / name
    with FileLock(BUILDS / f"{name}.lock"):
        if not folder.exists():
            unfinished = BUILDS / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def template_id(symbol: str) -> str:
    """`name<arguments>` of a mangled instance of a function template."""
    signature = subprocess.run(
        ["c++filt", "--no-recurse-limit", symbol], check=True, capture_output=True, text=True
    ).stdout.strip()
    start = signature.index(" ") + 1  # after the type of the result
    depth = 0
    for position in range(signature.index("<", start), len(signature)):
        depth += {"<": 1, ">": -1}.get(signature[position], 0)
        if depth == 0:
            return signature[start : position + 1]
    raise ValueError(f"{signature} is no template's instance")


def parameter_sizes(ptx: str, entry: str) -> list[int]:
    """Bytes of each parameter of a kernel, from its declaration."""
    declaration = re.search(rf"\.entry {re.escape(entry)}\((.*?)\)", ptx, re.S)
    assert declaration is not None
    sizes = []
    for line in declaration[1].split(","):
        array = re.search(r"\.b8 \S+\[(\d+)\]", line)
        sizes.append(int(array[1]) if array else int(re.search(r"\.[a-z](\d+) ", line)[1]) // 8)
    return sizes
