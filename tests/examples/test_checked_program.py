"""The example that `warpcheck` runs: a program of cuda.core, unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deep_moe.emulator.cuda import run_program

pytest.importorskip("cuda.core")

PROGRAM = Path(__file__).parents[2] / "examples" / "checked_program.py"


def test_the_program_runs_without_findings(capfd: pytest.CaptureFixture[str]):
    run = run_program([sys.executable, str(PROGRAM)], timeout=200)
    assert capfd.readouterr().out == "the sum is 499500.0\n"
    assert (run.status, run.findings, run.launches) == (0, (), 1)


def test_without_its_barrier_a_race_is_found():
    run = run_program([sys.executable, str(PROGRAM), "--race"], timeout=200)
    assert run.causes[0].kind == "race"
    assert "part" in run.causes[0].finding.text
