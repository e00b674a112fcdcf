"""Builds distributions for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".venv", ".git", "build", "dist", "*.egg-info", ".*_cache", "__pycache__", "*.so"
)


def copy_of(folder: Path, to: Path) -> Path:
    """Without what is no source: building writes beside the sources."""
    shutil.copytree(folder, to, ignore=NOT_SOURCE)
    return to


def build_once(source: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was built from it alone. A minute's
    work, which the workers of one run do once. name: of the folder."""
    of_this_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_this_run = of_this_run.parent
    output, unfinished = of_this_run / name, of_this_run / f"{name}-unfinished"
    with FileLock(of_this_run / f"{name}.lock"):
        if output.exists():
            return output
        result = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", unfinished, source],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        unfinished.rename(output)
    return output
