"""The benchmark of several domains: its options, and a run on two emulated ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.two_level import parse_arguments, run_rank
from deep_moe.trial.rank_processes import run_on_ranks

SMALL = ["--hidden", "128", "--intermediate", "128", "--topk", "2", "--experts", "4"]
BRIEF = ["--calls", "1", "--warmup", "0", "--commit", "abc", "--modes", "fixed", "exact, 4 chunks"]


def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--calls", "0"], ["--tokens", "0"], ["--domains", "0"]):
        with pytest.raises(SystemExit):
            parse_arguments(words)
        words_of_error = "--tokens, --calls and --domains must be at least 1"
        assert words_of_error in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_reports_every_path(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = parse_arguments([*SMALL, *BRIEF, "--tokens", "3", "--json", str(path)])
    run_on_ranks(run_rank, 2, "cpu", arguments)
    report = json.loads(path.read_text())
    assert report["machine"]["commit"] == "abc"
    (result,) = report["results"]
    assert list(result["two_level"]) == ["fixed", "exact, 4 chunks"]
    for of_path in (result["fused"], *result["two_level"].values()):
        assert min(of_path["us"], of_path["host_us"]) > 0
    assert report["bytes"]["fixed"] > 0
