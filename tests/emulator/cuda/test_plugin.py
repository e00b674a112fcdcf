"""The fixture `warpcheck`, as a project of its own uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .building import host_program, kernels_ptx

TESTS = """
import pytest

PROGRAM, IMAGE = {program!r}, {image!r}

def test_adds(warpcheck):
    assert warpcheck([PROGRAM, "adds", IMAGE], seed=3).launches == 1

def test_race(warpcheck):
    warpcheck([PROGRAM, "race", IMAGE])

def test_known(warpcheck, tmp_path):
    known = tmp_path / "known.txt"
    known.write_text("race race")
    warpcheck([PROGRAM, "race", IMAGE], suppressions=known)

def test_status(warpcheck):
    warpcheck([PROGRAM, "exits_with_3", IMAGE])

def test_allowed_status(warpcheck):
    assert warpcheck([PROGRAM, "exits_with_3", IMAGE], allow_status=True).status == 3
"""


def test_the_fixture_fails_tests_with_what_was_found(tmp_path: Path):
    image = tmp_path / "kernels.ptx"
    image.write_text(kernels_ptx())
    program = str(host_program("driver.cpp"))
    (tmp_path / "test_it.py").write_text(TESTS.format(program=program, image=str(image)))
    plugin = ("-p", "deep_moe.emulator.cuda.pytest_plugin")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=200,
    )
    assert "2 failed, 3 passed" in result.stdout, result.stdout
    assert "error: race: data race at byte 0" in result.stdout
    assert "ended with status 3" in result.stdout
