"""Programs whose compilers and runtimes were made for a GPU run as they are: they get PTX where
they ask for machine code, and the stand-in where they hold NVIDIA's runtime."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

from .building import PROGRAMS, build, kernels_ptx, run_printing

ON_X86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the jumps of x86-64 are what it reads"
)


LOADS_A_CUBIN = """
import os, struct, sys
from pathlib import Path
from cuda.bindings import driver

def cubin(text):  # an ELF file with one header of a section
    return struct.pack("<4s5B7x2HI3QI6H", b"\\x7fELF", 2, 1, 1, 0, 0, 2, 190, 1,
                       0, 0, 64 + len(text), 0, 64, 56, 0, 64, 1, 0) + text + bytes(64)

kept = Path(os.environ["WARPCHECK_REPORT"], "kept")
for name, text in (("other", b"other one"), ("made", b"this one")):
    (kept / f"{name}.sm_90a.cubin").write_bytes(cubin(text))
(kept / "made.sm_90a.ptx").write_text(Path(sys.argv[1]).read_text())
assert driver.cuInit(0)[0] == 0
_, context = driver.cuDevicePrimaryCtxRetain(0)
driver.cuCtxSetCurrent(context)
for text in (b"this one", b"that one", b"other one"):
    print(int(driver.cuModuleLoadData(cubin(text))[0]))
"""


def test_a_cubin_has_the_ptx_that_its_compiler_kept_beside_it(tmp_path: Path):
    image = tmp_path / "kernels.ptx"
    image.write_text(kernels_ptx())
    result, printed = run_printing([sys.executable, "-c", LOADS_A_CUBIN, str(image)], tmp_path)
    assert result.status == 0, printed
    # Another cubin, and one without PTX, have none.
    assert [line for line in printed.split("\n") if line.isdecimal()] == ["0", "209", "209"]
    assert [call.call for call in result.calls] == ["cuModuleLoadData"] * 2


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--cubin", "-arch=sm_90a", "a.cu"], ["-ptx"]),
        (["-cubin", "a.cu"], ["-ptx"]),
        (["-c", "a.cu"], []),
        (["-ptx", "a.cu"], []),
    ],
)
def test_nvcc_is_asked_for_ptx_in_place_of_a_cubin(
    words: list[str], added: list[str], tmp_path: Path
):
    compiler = tmp_path / "nvcc"
    compiler.symlink_to(shutil.which("echo") or "echo")
    result, printed = run_printing([str(compiler), *words], tmp_path)
    assert (result.status, printed.split()) == (0, [*words, *added])


USES_THE_RUNTIME = """
import numpy as np
import sitecustomize
from cuda.bindings import runtime

(status, address) = runtime.cudaMalloc(400)
assert status == runtime.cudaError_t.cudaSuccess, status
source, target = np.arange(100, dtype=np.int32), np.zeros(100, np.int32)
kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
assert runtime.cudaMemcpy(address, source.ctypes.data, 400, kind)[0] == 0
assert runtime.cudaMemcpy(target.ctypes.data, address, 400, kind)[0] == 0
assert (target == source).all()
print(int(runtime.cudaArrayGetInfo(0)[0]), sitecustomize.OWN)
"""


def test_cuda_bindings_runtime_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("OWN = 'mine'\n")
    paths = [str(own), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    result, printed = run_printing([sys.executable, "-c", USES_THE_RUNTIME], tmp_path)
    assert (result.status, printed.split("\n")[-2]) == (0, "801 mine"), printed
    assert [call.call for call in result.calls] == ["cudaArrayGetInfo"]


CALLS_THE_LIBRARY = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
number = ctypes.c_int()
for call in ("_cudaGetDeviceCount", "_cuDriverGetVersion", "_cudaOfTomorrow"):
    print(library[call](ctypes.byref(number)), number.value)
print(library.devices_by_the_inner_one())
"""


@ON_X86
def test_the_runtime_in_the_library_of_cute_dsl_is_replaced(tmp_path: Path):
    compiler = os.environ.get("CXX", "g++")
    # NVIDIA's functions are long enough for a jump in their place.
    command = [compiler, "-shared", "-fPIC", "-O1", "-s", "-falign-functions=32"]
    built = build(PROGRAMS / "cute_dsl_library.cpp", command, ".so")
    library = tmp_path / "libcute_dsl_runtime.so"
    shutil.copy(built, library)
    result, printed = run_printing(
        [sys.executable, "-c", CALLS_THE_LIBRARY, str(library)], tmp_path
    )
    lines = [line for line in printed.split("\n") if not line.startswith("warpcheck")]
    assert result.status == 0, printed
    assert lines[0] == "0 1"
    status, version = map(int, lines[1].split())
    assert status == 0
    assert version > 12000
    assert lines[2:4] == [f"801 {version}", "1"]  # refused, and nothing written
    assert [call.call for call in result.calls] == ["cudaOfTomorrow"]
