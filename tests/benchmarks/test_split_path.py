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
        (["--tokens", "1025"], "--tokens must be at most 1024, of a low-latency dispatch"),
        (["--path", "throughput", "--tokens", "32769"], "--tokens must be at most 32768"),
        (["--path", "throughput", "--zero-copy"], "--zero-copy is for --path low-latency"),
        (["--path", "throughput", "--model", "gpt-oss-120b"], "--without-unfused is needed"),
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
@pytest.mark.parametrize("path_words", [["--zero-copy"], ["--path", "throughput"]])
def test_two_emulated_ranks(tmp_path: Path, path_words: list[str]) -> None:
    path = tmp_path / "report.json"
    words = [*SMALL, *BRIEF, *path_words, "--tokens", "3", "--json", str(path)]
    run_on_ranks(run_rank, 2, "cpu", parse_arguments(words))
    (result,) = json.loads(path.read_text())["results"]
    assert result["tokens_per_rank"] == 3
    assert result["cosine_distance"] < 0.003  # weights are applied elsewhere, so h rounds otherwise
    assert "times the fused call" in line(result)
    is_beside_unfused = "throughput" in path_words
    assert ("unfused" in result) == is_beside_unfused
    assert ("times the path" in line(result)) == is_beside_unfused
