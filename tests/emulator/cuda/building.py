"""Compiles and runs the programs of tests under the stand-in."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from warpcheck.cuda import GpuOptions, ProgramRun, run_program

from deep_moe.emulator import compile_to_ptx
from deep_moe.jit.headers import find_headers

PROGRAMS = Path(__file__).parent / "programs"
BUILDS = Path(__file__).parents[3] / "build" / "stand-in-programs"


def build(source: Path, command: list[str], suffix: str = "") -> Path:
    """The program that `command` makes of a source, kept under a digest of both."""
    text = source.read_bytes() + " ".join(command).encode()
    output = BUILDS / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}{suffix}"
    if not output.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            made = Path(folder) / "program"
            subprocess.run([*command, str(source), "-o", str(made)], check=True, timeout=300)
            made.replace(output)
    return output


def host_program(name: str) -> Path:
    """A C++ program that uses CUDA's headers and no compiler of NVIDIA's."""
    includes = [f"-I{path}" for path in find_headers().include_paths]
    compiler = os.environ.get("CXX", "g++")
    return build(PROGRAMS / name, [compiler, "-std=c++17", *includes, "-ldl"])


def kernels_ptx(arch: str = "sm_90a") -> str:
    """The PTX of `kernels.cu`."""
    return compile_to_ptx((PROGRAMS / "kernels.cu").read_text(), arch=arch)


def nvcc() -> str | None:
    return shutil.which("nvcc")


def run_printing(words: list[str], folder: Path, **environment: str) -> tuple[ProgramRun, str]:
    """What came of a program, and what it printed."""
    output = folder / "printed.txt"
    with output.open("w") as stream:
        result = run_program(
            words,
            GpuOptions(sms=4),
            timeout=300,
            environment=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    return result, output.read_text()
