"""The example that runs a model of transformers, emulated, with its experts on two ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .test_served_model import EXAMPLES

pytest.importorskip("transformers", minversion="5.16.1")

SMALL = ["--layers", "2", "--experts", "8", "--topk", "2", "--hidden", "256"]
SMALL += ["--intermediate", "128", "--prompts", "4", "--prompt-tokens", "8", "--new-tokens", "2"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "serve_transformers.py"), *SMALL, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_model_whose_experts_are_on_two_ranks():
    done = run("--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("mlp.experts: experts run by deep_moe") == 2 * 2
    # Every prompt once: each rank has written its share.
    assert "log-probabilities of 28 tokens" in done.stdout


def test_prompts_are_shared_out():
    done = run("--ranks", "3")
    assert done.returncode == 2
    assert "--prompts must be a multiple of --ranks" in done.stderr
