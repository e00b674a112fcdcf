"""The distribution: what it installs, and that it works away from the checkout."""

from __future__ import annotations

import email
import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Set
from pathlib import Path

import pytest

from .building import ROOT, build_once, copy_of

# A wheel and its source are built: a minute, unless the machine is loaded.
pytestmark = pytest.mark.timeout(3600)

# Where the packages of the wheel come from.
FOLDERS = {
    "deep_moe": "deep_moe",
    "jit": "deep_moe/jit",
    "heuristics": "deep_moe/heuristics",
    "emulator": "deep_moe/emulator",
}


def run_python(code: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A new interpreter that finds deep_moe in `path`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def headers_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*.cuh")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(ROOT, tmp_path_factory.mktemp("source") / "deep-moe")


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_once(source, "dist", tmp_path_factory)


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel would put into site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(installed: Path) -> email.message.Message:
    return email.message_from_string(
        (installed / "deep_moe-0.1.0.dist-info" / "METADATA").read_text(encoding="utf-8")
    )


def symbol_versions(library: Path) -> dict[str, set[tuple[int, ...]]]:
    """The versions of symbols that a library needs, by the name before the number."""
    listing = subprocess.run(
        ["objdump", "-T", str(library)], capture_output=True, text=True, check=True
    ).stdout
    versions: dict[str, set[tuple[int, ...]]] = {}
    for line in listing.splitlines():
        if "*UND*" in line and (match := re.search(r"\(([A-Z]+)_([0-9.]+)\)", line)):
            number = tuple(int(part) for part in match[2].split("."))
            versions.setdefault(match[1], set()).add(number)
    return versions


def check_symbols(library: Path, others: Set[str] = frozenset()) -> None:
    """That a library loads wherever glibc is 2.28 or newer, with the libraries `others`."""
    versions = symbol_versions(library)
    assert set(versions) == {"GLIBC", "GCC"}  # no GLIBCXX, no CXXABI: the C++ library is inside
    assert max(versions["GLIBC"]) <= (2, 28)
    assert max(versions["GCC"]) <= (4, 2, 0)
    needed = subprocess.run(
        ["objdump", "-p", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"NEEDED +(\S+)", needed)) - others <= {
        "libc.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }


def test_the_emulators_library_needs_no_newer_glibc_than_the_wheel_says():
    from deep_moe.emulator import library

    check_symbols(library.library_path())


def test_the_stand_in_for_the_driver_needs_no_newer_glibc_and_shows_no_names_but_those_asked_for():
    from deep_moe.emulator import library

    path = library.stand_in_path()
    check_symbols(path, {library.LIBRARY_NAME})
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in listing.splitlines()}
    assert {"cuInit", "cudaMalloc", "__cudaRegisterFatBinary"} <= names
    versions = {"libcudart.so.12", "libcudart.so.13"}  # of the runtime, which programs ask for
    others = {name for name in names if not name.startswith(("cu", "__cuda"))}
    # dlopen: to see which libraries programs load; the other: what site_hook.py calls.
    assert others == versions | {"dlopen", "warpcheck_redirect"}


def test_the_emulators_library_shows_its_c_abi_and_nothing_else():
    from deep_moe.emulator import library

    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library.library_path())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in listing.splitlines()}
    assert "dm_run" in names
    assert {name for name in names if not name.startswith("dm_")} == set()


@pytest.mark.slow
def test_the_tag_says_any_python_3_on_linux_with_glibc_2_28(wheel: Path, installed: Path):
    assert wheel.name == f"deep_moe-0.1.0-py3-none-manylinux_2_28_{platform.machine()}.whl"
    emulator = installed / "deep_moe" / "emulator"
    (library,) = emulator.glob("*.so")
    check_symbols(library)
    check_symbols(emulator / "cuda" / "libcuda.so.1", {library.name})


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says what the repository holds")
def test_the_source_distribution_holds_every_file_of_the_repository(distributions: Path):
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = {name for name in listing.splitlines() if (ROOT / name).is_file()}
    assert "tests/packaging/test_wheel.py" in files
    assert files - names == set()


@pytest.mark.slow
def test_the_description_links_to_nothing_inside_the_repository(metadata: email.message.Message):
    text = str(metadata.get_payload())
    assert "make demo\nmake test" in text
    assert "`docs/architecture.md`" in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []


@pytest.mark.slow
def test_any_minor_of_cuda_13_will_do(metadata: email.message.Message):
    required = {
        str(line).split(";")[0].strip() for line in metadata.get_all("Requires-Dist", failobj=[])
    }
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "cuda-bindings"):
        assert f"{package}<14,>=13" in required


@pytest.mark.slow
def test_no_other_name_lands_in_site_packages(installed: Path):
    assert sorted(path.name for path in installed.iterdir()) == [
        "deep_moe",
        "deep_moe-0.1.0.dist-info",
    ]


@pytest.mark.slow
def test_every_part_is_inside(installed: Path, source: Path):
    package = installed / "deep_moe"
    modules = {
        str(Path(place) / path.relative_to(source / folder))
        for folder, place in FOLDERS.items()
        for path in (source / folder).rglob("*.py")
    } - {"deep_moe/emulator/setup.py"}
    assert "deep_moe/heuristics/sm100.py" in modules
    assert modules == {str(path.relative_to(installed)) for path in installed.rglob("*.py")}
    for name in ("py.typed", "jit/template/mega_moe.cu.j2"):
        assert (package / name).is_file(), name
    tables = {path.name for path in (source / "heuristics" / "tables").glob("*.json")}
    assert {path.name for path in (package / "heuristics").glob("tables/*.json")} == tables
    parts = {path.name for path in (source / "deep_moe" / "traces" / "page").iterdir()}
    assert "timeline.html" in parts
    assert {path.name for path in (package / "traces" / "page").iterdir()} == parts
    assert headers_below(package / "include") == headers_below(source / "include")
    assert len(list((package / "emulator").glob("*.so"))) == 1


@pytest.mark.slow
def test_an_installed_copy_runs_a_layer(installed: Path, tmp_path: Path):
    result = run_python(
        "import sys, deep_moe, deep_moe.cli\n"
        "assert deep_moe.__file__.startswith(sys.path[1]), (deep_moe.__file__, sys.path)\n"
        "sys.argv[1:] = ['run', '--exact', '--ranks', '1', '--tokens', '2', '--hidden', '128',\n"
        "                '--intermediate', '128', '--experts', '1', '--topk', '1']\n"
        "deep_moe.cli.main()",
        installed,
        tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok" in result.stdout


def test_a_checkout_works_without_an_installation(tmp_path: Path):
    result = run_python(
        "import deep_moe, deep_moe.jit, deep_moe.heuristics, deep_moe.emulator\n"
        "print(deep_moe.jit.__file__)",
        ROOT,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(ROOT / "jit" / "__init__.py")
