"""Drawn PTX under sanitizers: whatever the text, no access outside of memory, nothing undefined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .drawn import run

SECONDS = 60


@pytest.mark.slow
def test_drawn_ptx_is_safe(tmp_path: Path) -> None:
    result = run(tmp_path, seed=0, seconds=SECONDS)
    assert result.returncode == 0, result.stderr[-6000:] + (tmp_path / "case.ptx").read_text()
    counted = re.search(r"(\d+) cases, .* (\d+) ran to their end", result.stdout)
    assert counted is not None
    assert int(counted[2]) > 20, counted[0]
