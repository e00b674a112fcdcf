"""Programs that make machine code of PTX by nvJitLink or by Triton's ptxas get the PTX."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from warpcheck.cuda import ProgramRun, run_program

from .building import PROGRAMS, build, host_program, kernels_ptx

TIMEOUT = 120


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the name by which the stand-in knows nvJitLink; its own functions only fail."""
    compiler = os.environ.get("CXX", "g++")
    built = build(PROGRAMS / "linker_library.cpp", [compiler, "-shared", "-fPIC"], ".so")
    named = tmp_path_factory.mktemp("library") / "libnvJitLink.so.13"
    shutil.copy(built, named)
    return named


def run(how: str, library: Path, tmp_path: Path) -> tuple[ProgramRun, str]:
    image, output = tmp_path / "kernels.ptx", tmp_path / "printed.txt"
    image.write_text(kernels_ptx())
    program = host_program("jit_linker.cpp")
    with output.open("w") as stream:
        result = run_program(
            [str(program), str(library), str(image), how],
            timeout=TIMEOUT,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    return result, output.read_text()


@pytest.mark.parametrize("how", ["data", "file"])
def test_linked_ptx_runs(how: str, library: Path, tmp_path: Path):
    result, printed = run(how, library, tmp_path)
    assert (result.status, printed) == (0, "ok\n")
    assert result.launches == 1


def test_a_second_ptx_is_refused(library: Path, tmp_path: Path):
    result, printed = run("twice", library, tmp_path)
    assert result.status == 0
    assert "the emulator links one PTX" in printed
    assert [call.call for call in result.calls] == ["nvJitLinkAddData"]


def test_ptxas_of_triton_keeps_the_ptx(tmp_path: Path):
    source = tmp_path / "kernel.ptx"
    source.write_text(".version 8.7\n")
    script = (
        f"for tool in $TRITON_PTXAS_PATH $TRITON_PTXAS_BLACKWELL_PATH; do"
        f" $tool -lineinfo -v --gpu-name=sm_90a {source} -o {tmp_path}/kernel.o || exit 1;"
        f" cmp {source} {tmp_path}/kernel.o || exit 2; rm {tmp_path}/kernel.o;"
        " $tool --version | grep -q 'release 13.0' || exit 3; done;"
        ' test -e "$TRITON_LIBCUDA_PATH/libcuda.so.1"'
    )
    assert run_program(["sh", "-c", script], timeout=TIMEOUT).status == 0
