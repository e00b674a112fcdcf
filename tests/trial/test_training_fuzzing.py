"""Fuzz cases of the differentiable layer: what they differ in, and that a wrong result is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.split.throughput import AllToAll
from deep_moe.training import experts
from deep_moe.trial.fuzzing import Coverage
from deep_moe.trial.training_bounds import Ball
from deep_moe.trial.training_fuzzing import (
    CASES_PER_ROUND,
    TrainingCase,
    run_in_threads,
)

SOME = (0, 4, 12, 16, 20)  # on one rank and on several, PyTorch's steps and kernels


def test_in_a_round_every_two_values_meet() -> None:
    coverage = Coverage()
    for number in range(CASES_PER_ROUND):
        coverage.add(TrainingCase.of(number), "")
    assert coverage.num_pairs == coverage.num_all_pairs > 400


@pytest.mark.parametrize("number", SOME)
def test_some_cases(number: int) -> None:
    assert TrainingCase.of(number).run() == ""


@pytest.mark.slow
def test_a_round() -> None:
    result = CliRunner().invoke(
        app, ["fuzz", "--path", "training", "--count", str(CASES_PER_ROUND)]
    )
    assert result.exit_code == 0, result.output
    assert f"{CASES_PER_ROUND} cases, 0 failed" in result.output


def with_values(**wanted: Any) -> TrainingCase:
    return TrainingCase(1, {**TrainingCase.of(1).values, **wanted})


PLAIN = {"ranks": "one", "steps": None, "tokens": "any", "gates": "numbers", "slots": "all"}
PLAIN |= {"kept": "as usual"}


@pytest.mark.parametrize(
    ("precision", "kept", "factor"),
    [
        ("bf16", "as usual", 1.25),
        ("bf16", "quantized", -1.0),
        ("mxfp8", "as usual", -1.0),
        ("fp8", "as usual", -1.0),
        ("fp8_dgrad", "as usual", -1.0),
        ("fp8_wgrad", "as usual", -1.0),
    ],
)
@pytest.mark.parametrize("name", ["out", "x", "topk_weights", "w1", "w2"])
def test_one_wrong_value_is_seen(
    name: str, precision: str, kept: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a quarter; where E4M3 rounds each of many terms at its worst, by its sign."""
    case = with_values(**{**PLAIN, "precision": precision, "kept": kept})
    results = case.results()
    largest = results[name].abs().argmax()
    results[name].view(-1)[largest] *= factor
    monkeypatch.setattr(TrainingCase, "results", lambda _: results)
    assert case.run().startswith(f"{name}[{largest}] is ")


def test_a_gradient_of_an_expert_without_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_values(ranks="one", steps=None, slots="all to one expert")
    results = case.results()
    results["w2"][-1, 0, 0] = 2.0**-100
    monkeypatch.setattr(TrainingCase, "results", lambda _: results)
    assert case.run().startswith("w2[")


def test_not_a_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_values(**PLAIN)
    results = case.results()
    results["x"][0, 0] = float("nan")
    monkeypatch.setattr(TrainingCase, "results", lambda _: results)
    assert case.run().startswith("x[0] is nan")


def test_a_rank_that_multiplies_its_own_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug of the flow that the layer was built after."""
    case = with_values(**{**PLAIN, "ranks": 2})
    real = experts.grouped_weight_gradient

    def local(rows: torch.Tensor, d_rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return real(rows.roll(1, 0), d_rows, offs)

    monkeypatch.setattr(experts, "grouped_weight_gradient", local)
    assert case.run().startswith("w")


def test_sums_of_balls_hold_what_rounding_makes() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    product = (Ball.exact(a) @ Ball.exact(b)).rounded()
    error = product.error_of((a.float() @ b.float()).bfloat16())
    assert 0.5 < error.max() <= 1  # no wider than it has to be


def test_what_one_rank_raises_is_raised() -> None:
    """The others do not wait for it for ever."""
    group = EmulatedThroughputAllToAll(2, 4, 128, 4, 2, 32, expert_alignment=8, num_sms=2)

    def work(rank: int, layer: AllToAll) -> None:
        if rank == 1:
            raise ValueError("rank 1 has its own opinion")
        layer.dispatch(torch.ones(1, 128).bfloat16(), torch.zeros(1, 2, dtype=torch.int64))

    with group, pytest.raises(ValueError, match="its own opinion"):
        run_in_threads(group, "random", work)


def test_what_goes_with_training_only() -> None:
    refused = CliRunner().invoke(
        app, ["fuzz", "--path", "training", "--count", "1", "--weights", "fp8"]
    )
    assert refused.exit_code == 2
    words = " ".join(refused.output.replace("│", " ").split())
    assert "must be without --path training" in words


def test_failures_say_how_to_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingCase, "run", lambda _: "broken")
    result = CliRunner().invoke(app, ["fuzz", "--path", "training", "--first", "7", "--count", "1"])
    assert result.exit_code == 1
    assert "deep-moe fuzz --path training --first 7 --count 1" in result.output.replace("\n", " ")
