"""The distribution: what it installs, and that it works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".venv", ".git", "build", "dist", "*.egg-info", ".*_cache", "__pycache__", "*.so"
)


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
    """A copy: building writes beside the sources."""
    folder = tmp_path_factory.mktemp("source") / "deep-moe"
    shutil.copytree(ROOT, folder, ignore=NOT_SOURCE)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as an installer would."""
    output = tmp_path_factory.mktemp("dist")
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel would put into site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow
def test_the_tag_says_any_python_3_on_linux(wheel: Path):
    assert wheel.name == "deep_moe-0.1.0-py3-none-linux_x86_64.whl"


@pytest.mark.slow
def test_no_other_name_lands_in_site_packages(installed: Path):
    assert sorted(path.name for path in installed.iterdir()) == [
        "deep_moe",
        "deep_moe-0.1.0.dist-info",
    ]


@pytest.mark.slow
def test_every_part_is_inside(installed: Path, source: Path):
    package = installed / "deep_moe"
    for name in ("py.typed", "cli/run.py", "jit/template/mega_moe.cu.j2", "heuristics/sm100.py"):
        assert (package / name).is_file(), name
    tables = {path.name for path in (source / "heuristics" / "tables").glob("*.json")}
    assert {path.name for path in (package / "heuristics").glob("tables/*.json")} == tables
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
