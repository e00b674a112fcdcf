"""What benchmarks/training_ranks.py times, in small, on two ranks and on a CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import training, training_ranks
from benchmarks.training import Model
from benchmarks.training_ranks import PATHS, parse_arguments, run_rank
from deep_moe.trial.rank_processes import run_on_ranks

MODELS = {"fine-grained": Model(hidden=128, intermediate=32, num_experts=3, num_topk=2)}
BRIEF = ["--models", "fine-grained", "--tokens", "24", "--calls", "1", "--rounds", "1"]


@pytest.mark.parametrize("option", ["--tokens", "--calls", "--rounds"])
def test_impossible_options_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([option, "0"])
    assert "--tokens, --calls and --rounds must be at least 1" in capsys.readouterr().err


def run_uncompiled(device: torch.device, arguments: argparse.Namespace) -> None:
    torch.compile = lambda function: function  # type: ignore[assignment]
    run_rank(device, arguments, MODELS)


def test_all_paths_agree_and_are_timed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [*BRIEF, "--warmup", "0", "--commit", "abc", "--json", str(report)]
    run_on_ranks(run_uncompiled, 2, "cpu", parse_arguments(words))
    read = json.loads(report.read_text())
    assert (read["num_ranks"], read["machine"]["commit"]) == (2, "abc")
    (result,) = read["results"]
    assert (result["model"], result["tokens_per_rank"]) == ("fine-grained", 24)
    assert tuple(result["paths"]) == PATHS
    assert all(path["ms"] > 0 for path in result["paths"].values())


def test_a_wrong_layer_is_not_timed() -> None:
    right = [torch.ones(4) for _ in training.RESULTS]
    wrong = [*right[:3], right[3].clone(), right[4]]
    wrong[3][0] = 1.1
    paths = {"plain": lambda: right, "all_to_all": lambda: right, "kept": lambda: wrong}
    with pytest.raises(RuntimeError, match="kept: w13 differs from the plain layer's by"):
        training_ranks.check(paths)
