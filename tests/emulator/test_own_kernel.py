"""The example of a kernel that is not ours: its result, and what it says of the missing wait."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_kernel.py"


def test_the_example_runs_and_the_missing_wait_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    assert "right under four schedules" in shown
    assert "Without the wait:\n" in shown
    # Which of the two comes first is the schedule's choice.
    assert "RaceDetected: data race at transpose::tile" in shown or "Uninitialized" in shown
    assert "ld.shared" in shown
