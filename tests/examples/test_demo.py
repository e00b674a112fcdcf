"""What `make demo` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_passes_and_may_be_run_again(tmp_path: Path) -> None:
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "demo.py")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.rstrip().endswith("PASS")
