"""Tests of GPUs are run without one as far as they go, so that they do not rot between machines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# They start processes of their own.
OTHERS = {"test_dry_gpu.py", "test_docs.py", "test_killed_rank.py"}
FILES = [
    path
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if "pytest.mark.gpu" in path.read_text() and path.name not in OTHERS
]


def dry_run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "tests.dry_gpu"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", "gpu", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_they_come_to_the_gpu() -> None:
    done = dry_run(*FILES)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 300


ROTTEN = {
    "run_ranks(Place.GPUS, 1, work, 3, 4)": "TypeError: too many positional arguments",
    "run_ranks(Place.GPUS, 1, lambda rank: 0)": "Can't pickle",
    "make_buffer(3, 4, 5)": "TypeError: make_buffer",
    "compile_all([gpu_config(5, 6, no=1)])": "TypeError: gpu_config() got an unexpected keyword",
    "RankLayer(None, SHAPE, exact=1).compare_call(TOKENS, activation='relu2')": "AssertionError",
    "RankLayer(None, SHAPE, exact=1).compare_call(TOKENS, overrides={'block_m': 7})": "ValueError",
    "torch.no_such_function()": "AttributeError: module 'torch' has no attribute",
}
HEAD = """
import pytest
import torch
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import random_tokens
from tests.layer.kernels import compile_all, gpu_config
from tests.layer.rank_layer import RankLayer, make_buffer
from tests.layer.rank_pool import Place

pytestmark = pytest.mark.gpu
SHAPE = MoEShape(1, 8, 4, 1024, 512, 3)
TOKENS = random_tokens(SHAPE, 3)


@pytest.fixture
def run_ranks():
    raise NotImplementedError


def work(rank, number):
    pass
"""


def test_those_that_have_rotten_are_seen(tmp_path: Path) -> None:
    tests = [
        f"\n\ndef test_{i}(run_ranks):\n    {line}\n    torch.empty(1, device='cuda')\n"
        for i, line in enumerate(ROTTEN)
    ]
    (tmp_path / "test_rotten.py").write_text(HEAD + "".join(tests))
    done = dry_run(tmp_path / "test_rotten.py", "--rootdir", tmp_path)
    assert f"{len(ROTTEN)} failed" in done.stdout
    for error in ROTTEN.values():
        assert error in done.stdout
