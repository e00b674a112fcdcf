"""`deep-moe fuzz`: cases by number, and an exit status that tells."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.fuzzing import FuzzCase


def test_some_cases_pass() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--count", "3"])
    assert result.exit_code == 0, result.output
    assert "3 cases, 0 failed" in result.output


@pytest.mark.slow
def test_two_hundred_cases_pass() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--first", "1000", "--count", "200"])
    assert result.exit_code == 0, result.output


def test_a_failure_ends_with_the_line_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuzzCase, "run", lambda case: "broken" if case.number == 8 else "")
    result = CliRunner().invoke(app, ["fuzz", "--first", "7", "--count", "3"])
    assert result.exit_code == 1
    assert "repeat: deep-moe fuzz --first 8 --count 1" in result.output


def test_a_number_names_one_case() -> None:
    assert FuzzCase.of(5) == FuzzCase.of(5) != FuzzCase.of(6)


def test_without_a_limit_it_refuses() -> None:
    assert CliRunner().invoke(app, ["fuzz"]).exit_code == 2
