"""The benchmark of the split path: its options, and a run on two emulated ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.split_path import line, parse_arguments, run_rank, shape_of
from deep_moe.trial.rank_processes import run_on_ranks

SMALL = ["--hidden", "128", "--intermediate", "128", "--topk", "2", "--experts", "4", "--sms", "2"]
BRIEF = ["--calls", "1", "--rounds", "1", "--warmup", "0", "--commit", "abc"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calls", "0"], "--tokens, --calls, --rounds and --pairs must be at least 1"),
        (["--tokens", "1025"], "--tokens must be at most 1024"),
        (["--model", "gpt"], "invalid choice"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in capsys.readouterr().err


def test_sizes_are_the_models_unless_given() -> None:
    shape = shape_of(parse_arguments(["--hidden", "256"]), 2)
    assert (shape.hidden, shape.intermediate_hidden, shape.num_experts) == (256, 2048, 256)


@pytest.mark.slow
def test_two_emulated_ranks(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = [*SMALL, *BRIEF, "--tokens", "3", "--json", str(path), "--zero-copy"]
    run_on_ranks(run_rank, 2, "cpu", parse_arguments(words))
    (result,) = json.loads(path.read_text())["results"]
    assert result["tokens_per_rank"] == 3
    assert result["cosine_distance"] < 0.003  # weights are applied elsewhere, so h rounds otherwise
    assert "times the fused call" in line(result)
