"""Programs of five languages run as they are, without a GPU, with the right results and without
findings; a race that is put into one of them is found."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from deep_moe.emulator.cuda import ProgramRun

from ..emulator.cuda.building import run_printing

PROGRAMS = Path(__file__).parent


def run(program: Path, tmp_path: Path) -> tuple[ProgramRun, str]:
    cache = str(tmp_path / "triton")
    return run_printing([sys.executable, str(program)], tmp_path, TRITON_CACHE_DIR=cache)


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip("make test-compilers installs it")
    if package == "tilelang" and not shutil.which("nvcc"):
        pytest.skip("TileLang needs nvcc")


@pytest.mark.parametrize(
    ("program", "package", "launches"),
    [
        ("triton_program", "triton", 2),
        ("cupy_program", "cupy", 5),
        ("cute_dsl_program", "nvidia_cutlass_dsl", 1),
        ("tilelang_program", "tilelang", 1),
        ("numba_program", "numba_cuda", 1),
    ],
)
def test_a_program_runs(program: str, package: str, launches: int, tmp_path: Path):
    needs(package)
    result, printed = run(PROGRAMS / f"{program}.py", tmp_path)
    assert (result.status, printed[-3:]) == (0, "ok\n"), printed
    assert (result.findings, result.calls, result.launches) == ((), (), launches)


@pytest.mark.parametrize(
    ("program", "package", "barrier"),
    [
        ("cute_dsl_program", "nvidia_cutlass_dsl", "cute.arch.sync_threads()"),
        ("numba_program", "numba_cuda", "cuda.syncthreads()"),
    ],
)
def test_a_barrier_that_is_left_out_is_found(
    program: str, package: str, barrier: str, tmp_path: Path
):
    needs(package)
    text = (PROGRAMS / f"{program}.py").read_text()
    assert barrier in text
    without = tmp_path / "without.py"
    without.write_text(text.replace(barrier, "pass", 1))
    result, _ = run(without, tmp_path)
    assert "race" in {finding.kind for finding, _ in result.findings}
