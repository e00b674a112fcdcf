"""Which headers a kernel sees, and what is said when some are missing."""

import importlib.util
from pathlib import Path

import pytest

from deep_moe.errors import MissingPackageError
from deep_moe.jit import headers
from deep_moe.jit.headers import find_cutlass, find_headers, find_library, tree_digest


def make_cutlass(include: Path, *, minor: int = 2) -> Path:
    (include / "cute").mkdir(parents=True)
    (include / "cute" / "tensor.hpp").write_text("// cute\n")
    (include / "cutlass").mkdir()
    (include / "cutlass" / "version.h").write_text(
        f"#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH 1\n"
    )
    return include


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Python package offers headers, no toolkit is installed."""
    for variable in ("DEEP_MOE_CUTLASS_INCLUDE", "CUTLASS_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folders = headers._cuda_include_folders
    monkeypatch.setattr(
        headers,
        "_cuda_include_folders",
        lambda: (entry for entry in folders() if tmp_path in entry[0].parents),
    )


def test_all_headers_are_found_here() -> None:
    found = find_headers()
    for folder, probe in (
        (found.library, "deep_moe/layout/kernel_args.cuh"),
        (found.cutlass, "cute/tensor.hpp"),
        (found.cuda, "cuda_fp8.h"),
        (found.cccl, "cccl/cuda/std/cstdint"),
    ):
        assert (folder.path / probe).is_file()
    assert len(set(found.identities)) == 4


def test_any_change_of_our_headers_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "deep_moe").mkdir()
    header = tmp_path / "deep_moe" / "a.cuh"
    header.write_text("one")
    digests = {tree_digest(tmp_path)}
    header.write_text("two")
    digests.add(tree_digest(tmp_path))
    header.rename(tmp_path / "deep_moe" / "b.cuh")
    digests.add(tree_digest(tmp_path))
    (tmp_path / "deep_moe" / "c.cuh").write_text("")
    digests.add(tree_digest(tmp_path))
    assert len(digests) == 4


def test_the_include_variable_comes_first(monkeypatch, tmp_path: Path) -> None:
    include = make_cutlass(tmp_path / "chosen")
    monkeypatch.setenv("DEEP_MOE_CUTLASS_INCLUDE", str(include))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "nowhere"))
    assert find_cutlass().path == include
    assert "4.2.1" in find_cutlass().identity


def test_a_cutlass_checkout_is_found_and_versioned(monkeypatch, tmp_path: Path) -> None:
    make_cutlass(tmp_path / "cutlass" / "include", minor=7)
    monkeypatch.delenv("DEEP_MOE_CUTLASS_INCLUDE", raising=False)
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    assert find_cutlass().path == tmp_path / "cutlass" / "include"
    assert "4.7.1" in find_cutlass().identity


@pytest.mark.parametrize("variable", ["DEEP_MOE_CUTLASS_INCLUDE", "CUTLASS_PATH"])
def test_a_wrong_variable_is_an_error_that_names_it(monkeypatch, tmp_path, variable: str) -> None:
    monkeypatch.delenv("DEEP_MOE_CUTLASS_INCLUDE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(MissingPackageError, match=f"{variable}=.*cute/tensor.hpp"):
        find_cutlass()


@pytest.mark.usefixtures("without_packages")
def test_missing_cutlass_names_the_package() -> None:
    with pytest.raises(MissingPackageError, match="pip install nvidia-cutlass"):
        find_cutlass()


@pytest.mark.usefixtures("without_packages")
def test_missing_cuda_headers_name_their_packages(monkeypatch, tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match="pip install 'nvidia-cuda-runtime"):
        find_headers()
    toolkit = tmp_path / "toolkit"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include" / "cuda_fp8.h").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    with pytest.raises(MissingPackageError, match="pip install 'nvidia-cuda-cccl"):
        find_headers()


@pytest.mark.usefixtures("without_packages")
def test_a_toolkit_serves_where_packages_lack(monkeypatch, tmp_path: Path) -> None:
    include = tmp_path / "toolkit" / "include"
    (include / "cccl" / "cuda" / "std").mkdir(parents=True)
    (include / "cuda_fp8.h").write_text("")
    (include / "cuda.h").write_text("#define CUDA_VERSION 13010\n")
    (include / "cccl" / "cuda" / "std" / "cstdint").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("DEEP_MOE_CUTLASS_INCLUDE", str(make_cutlass(tmp_path / "cutlass")))
    found = find_headers()
    assert found.cuda.path == include
    assert found.cccl.path == include
    assert found.include_paths[-2:] == (include, include / "cccl")
    assert "13010" in found.cuda.identity
    assert "13010" in found.cccl.identity


def test_our_headers_missing_is_said(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(headers, "__file__", str(tmp_path / "jit" / "headers.py"))
    with pytest.raises(MissingPackageError, match="deep_moe's own C\\+\\+ headers are missing"):
        find_library()
