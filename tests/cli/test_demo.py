"""The demo and the examples: they pass, and the demo's lines fit a terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_passes_in_eighty_columns(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\nPASS\n")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert (tmp_path / "demo-out").is_dir()


@pytest.mark.slow
def test_the_example_of_two_domains_passes():
    """Four processes on a CPU."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone")
    result = subprocess.run(
        [sys.executable, *command, ROOT / "examples" / "two_level.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "rank 3, domain 1: 9 tokens, 0 wrong" in result.stdout
    assert result.stdout.rstrip().endswith("PASS")


def test_the_makefile_shows_that_it_goes_on(tmp_path: Path):
    """A stub in place of Python takes its time."""
    text = (ROOT / "Makefile").read_text()
    (tmp_path / "Makefile").write_text(text)
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).touch()
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text('#!/bin/sh\ncase "$*" in *torch*) sleep 3;; *wheel*) exit 7;; esac\n')
    stub.chmod(0o755)
    result = subprocess.run(
        ["make", "venv", f"PYTHON={stub}"],
        cwd=tmp_path,
        # As from a shell, also where the tests themselves were started by make.
        env={k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stdout.splitlines()
    assert lines[1].startswith("  1. a virtual environment")
    assert lines[1].endswith("done")
    assert lines[2].startswith("  2. PyTorch ..")
    assert lines[2].endswith(" done")
    assert lines[3].startswith("  3. build tools")
    assert "done" not in lines[3]
    assert result.returncode != 0
    assert len(lines) == 4
