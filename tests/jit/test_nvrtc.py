"""NVRTC: one compile gives cubin, PTX, log and resources, for any architecture."""

import importlib.metadata
import re
import sys

import pytest

from deep_moe.errors import CompileError, MissingPackageError
from deep_moe.jit import nvrtc
from deep_moe.jit.nvrtc import compile_source, compile_to_ptx, compiler_version, parse_resources

SOURCE = """
extern "C" __global__ void __launch_bounds__(128, 1) add_one(float* p) {
    __shared__ float s[128];
    s[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = s[threadIdx.x ^ 1] + 1.0f;
}
"""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_one_compile_gives_cubin_and_ptx(arch: str) -> None:
    result = compile_source(SOURCE, arch=arch, kernel="add_one")
    assert result.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in result.ptx
    assert ".entry add_one" in result.ptx
    assert ".loc" in result.ptx  # line information for error messages of the emulator
    assert not result.ptx.endswith("\0")
    assert result.resources.static_smem_bytes == 512
    assert compile_to_ptx(SOURCE, arch=arch, kernel="add_one") == result.ptx
    assert 0 < result.resources.num_registers <= 255
    assert result.resources.spill_store_bytes == 0


def test_the_working_folder_is_not_in_the_ptx(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in compile_source(SOURCE, arch="sm_90a", kernel="add_one").ptx


def test_a_compile_error_carries_log_options_and_context() -> None:
    broken = SOURCE.replace("p[threadIdx.x] = s", "p[threadIdx.x] = undeclared_name + s")
    with pytest.raises(CompileError) as caught:
        compile_source(broken, arch="sm_100a", kernel="add_one", context="config: {'hidden': 42}")
    text = str(caught.value)
    assert 'identifier "undeclared_name" is undefined' in text
    assert "add_one.cu(6)" in text
    assert "--gpu-architecture=sm_100a" in text
    assert "config: {'hidden': 42}" in text


def test_an_unknown_architecture_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="sm_1"):
        compile_source(SOURCE, arch="sm_1", kernel="add_one")


def test_a_kernel_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(CompileError, match="'other'"):
        compile_source(SOURCE, arch="sm_90a", kernel="other")


def test_resources_are_those_of_the_named_kernel() -> None:
    log = """
ptxas info    : Compiling entry function 'first' for 'sm_100a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
ptxas info    : Compiling entry function 'second' for 'sm_100a'
ptxas info    : Function properties for second
ptxas         .     96 bytes stack frame, 88 bytes spill stores, 104 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 96 bytes cumulative stack size, 64 bytes smem
"""
    first, second = parse_resources(log, "first"), parse_resources(log, "second")
    assert (first.num_registers, first.spill_store_bytes, first.static_smem_bytes) == (32, 0, 0)
    assert (second.num_registers, second.stack_bytes, second.static_smem_bytes) == (168, 96, 64)
    assert (second.spill_store_bytes, second.spill_load_bytes) == (88, 104)


def test_missing_bindings_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingPackageError, match="pip install 'cuda-bindings"):
        compile_source(SOURCE, arch="sm_90a", kernel="add_one")


def test_a_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as bindings

    def not_found() -> None:
        raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setattr(bindings, "nvrtcVersion", not_found)
    with pytest.raises(MissingPackageError, match="pip install 'nvidia-cuda-nvrtc"):
        compile_source(SOURCE, arch="sm_90a", kernel="add_one")


def test_the_compiler_version_is_the_packages() -> None:
    assert (
        compiler_version() == f"nvidia-cuda-nvrtc {importlib.metadata.version('nvidia-cuda-nvrtc')}"
    )


def test_without_the_package_the_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(nvrtc.importlib.metadata, "version", not_found)
    assert compiler_version().startswith("nvrtc 13.")
    assert "libnvrtc.so" in compiler_version()


def test_a_second_compile_has_a_log_too() -> None:
    """With a driver present, NVRTC would take the second from a cache of its own, without a log."""
    results = [compile_source(SOURCE, arch="sm_90a", kernel="add_one") for _ in range(2)]
    assert results[0].resources == results[1].resources
    assert "ptxas info" in results[1].log


OPTIONS_SOURCE = """
#include "numbers.h"
extern "C" __global__ void kernel(int* p) {
    *p = NUM + from_header();
}
static_assert(__cplusplus < 202002L);
"""


def test_options_and_headers_of_ones_own() -> None:
    ptx = compile_to_ptx(
        OPTIONS_SOURCE,
        arch="sm_90a",
        options=["-DNUM=40", "-std=c++17"],
        headers={"numbers.h": "constexpr int from_header() { return 2; }"},
    )
    assert re.search(r"\b42;", ptx)
    with pytest.raises(CompileError, match=r"-DNUM=40.*-std=c\+\+11"):
        compile_to_ptx(SOURCE, arch="sm_90a", options=["-DNUM=40", "-std=c++11", "-no-such-flag"])
    with pytest.raises(ValueError, match="options must be a sequence of strings; got '-DNUM=4'"):
        compile_to_ptx(SOURCE, arch="sm_90a", options="-DNUM=4")
