"""Programs that nvcc compiled run as they are. Skipped where there is no nvcc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from warpcheck.cuda import ProgramRun, run_program

from .building import PROGRAMS, build, nvcc

pytestmark = pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")

TO_PTX = ["-gencode", "arch=compute_90a,code=compute_90a"]


def compiled(*flags: str, name: str = "runtime.cu") -> Path:
    return build(PROGRAMS / name, [nvcc() or "", "-std=c++17", *flags])


def run(program: Path, tmp_path: Path) -> tuple[ProgramRun, str]:
    output = tmp_path / "printed.txt"
    with output.open("w") as stream:
        result = run_program([str(program)], timeout=120, stdout=stream, stderr=subprocess.STDOUT)
    return result, output.read_text()


@pytest.mark.parametrize(
    "flags",
    [
        TO_PTX,
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                ["--compress-mode=none", *TO_PTX],
                ["--compress-mode=speed", *TO_PTX],
                ["--compress-mode=size", *TO_PTX],
                ["-cudart", "shared", *TO_PTX],
                ["-arch=sm_90a", "-lineinfo"],
                ["-arch=compute_80"],
            )
        ),
    ],
    ids=" ".join,
)
def test_a_program_of_nvcc_runs(flags: list[str], tmp_path: Path):
    """With the runtime inside and beside it, and with every way to pack PTX."""
    if "compute_80" in flags[-1]:
        flags = [*flags, "-DNO_CLUSTERS"]
    result, printed = run(compiled(*flags), tmp_path)
    assert (result.status, printed) == (0, "sm_90\nok\n")
    assert result.findings == ()
    assert result.launches >= 3


@pytest.mark.slow
def test_a_program_with_machine_code_alone_is_refused(tmp_path: Path):
    result, _ = run(compiled("-gencode", "arch=compute_90a,code=sm_90a"), tmp_path)
    assert result.status == 1
    assert any("code=compute_90a" in call.text for call in result.calls)
    assert result.launches == 0


def test_a_stripped_program_learns_what_to_do(tmp_path: Path):
    program = tmp_path / "stripped"
    subprocess.run(["strip", "-o", program, compiled(*TO_PTX)], check=True)
    result, _ = run(program, tmp_path)
    assert result.status == 1
    assert any("-cudart shared" in call.text for call in result.calls)


LOADER = """
import ctypes, sys
numbers = (ctypes.c_int * 32)(*range(32))
print(ctypes.CDLL(sys.argv[1]).add_one(numbers), list(numbers)[:3])
"""


def test_a_library_that_is_loaded_later_runs_too(tmp_path: Path):
    library = compiled("-shared", "-Xcompiler", "-fPIC", *TO_PTX, name="library.cu")
    output = tmp_path / "printed.txt"
    with output.open("w") as stream:
        command = [sys.executable, "-c", LOADER, str(library)]
        result = run_program(command, timeout=120, stdout=stream)
    assert (result.status, output.read_text()) == (0, "0 [1, 2, 3]\n")
    assert (result.findings, result.launches) == ((), 1)
