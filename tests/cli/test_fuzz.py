"""`deep-moe fuzz`: cases by number, and an exit status that tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.fuzzing import FuzzCase


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_some_cases_pass(arch: str) -> None:
    result = CliRunner().invoke(app, ["fuzz", "--count", "2", "--arch", arch])
    assert result.exit_code == 0, result.output
    assert "2 cases, 0 failed" in result.output


@pytest.mark.slow
def test_two_hundred_cases_pass() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--first", "1000", "--count", "200"])
    assert result.exit_code == 0, result.output


def test_a_failure_ends_with_the_line_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuzzCase, "run", lambda case: "broken" if case.number == 8 else "")
    result = CliRunner().invoke(app, ["fuzz", "--first", "7", "--count", "3"])
    assert result.exit_code == 1
    assert "repeat: deep-moe fuzz --first 8 --count 1" in result.output


def test_a_corpus_comes_first_and_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers: list[int] = []

    def run(case: FuzzCase) -> str:
        numbers.append(case.number)
        return "broken" if case.number in (1, 40) else ""

    monkeypatch.setattr(FuzzCase, "run", run)
    corpus = tmp_path / "corpus"
    command = ["fuzz", "--corpus", str(corpus), "--count", "3"]
    assert CliRunner().invoke(app, command).exit_code == 1
    assert (numbers, corpus.read_text()) == ([0, 1, 2], "1\n")
    corpus.write_text("40\n1\n")
    numbers.clear()
    assert CliRunner().invoke(app, command).exit_code == 1
    assert (numbers, corpus.read_text()) == ([40, 1, 0], "40\n1\n")
    corpus.write_text("-3\n")
    assert CliRunner().invoke(app, command).exit_code == 2


def test_a_number_names_one_case() -> None:
    assert FuzzCase.of(5) == FuzzCase.of(5) != FuzzCase.of(6)


def test_without_a_limit_it_refuses() -> None:
    assert CliRunner().invoke(app, ["fuzz"]).exit_code == 2


def test_an_unknown_architecture_is_refused() -> None:
    assert CliRunner().invoke(app, ["fuzz", "--count", "1", "--arch", "sm_80"]).exit_code == 2
