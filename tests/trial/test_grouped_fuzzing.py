"""Fuzz cases of grouped experts and of grouped products: what they differ in, and that a wrong
result is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.split.grouped_experts import GroupedExperts
from deep_moe.trial import product_calls
from deep_moe.trial.fuzzing import ARCHS, Coverage
from deep_moe.trial.grouped_calls import UNTOUCHED
from deep_moe.trial.grouped_fuzzing import GroupedCase
from deep_moe.trial.product_fuzzing import CASES_PER_ROUND, ProductCase


def test_in_a_round_every_two_values_meet() -> None:
    coverage = Coverage()
    for number in range(CASES_PER_ROUND):
        coverage.add(ProductCase.of(number), "")
    assert coverage.num_pairs == coverage.num_all_pairs > 200


@pytest.mark.parametrize("number", [0, 4, 9])
def test_some_cases_of_grouped_experts(number: int) -> None:
    assert GroupedCase.of(number).run() == ""


def test_a_round_of_products() -> None:
    command = ["fuzz", "--path", "product", "--count", str(CASES_PER_ROUND), "--workers", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"{CASES_PER_ROUND} cases, 0 failed" in result.output


@pytest.mark.slow
def test_a_round_of_grouped_experts() -> None:
    count = len(ARCHS) * GroupedCase.cases_per_round()
    result = CliRunner().invoke(app, ["fuzz", "--path", "grouped", "--count", str(count)])
    assert result.exit_code == 0, result.output
    assert f"{count} cases, 0 failed" in result.output


def test_paths_with_axes_of_their_own() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--path", "product", "--count", "1", "--biases"])
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert "must be without --path product" in words


def next_value(y: torch.Tensor, used: torch.Tensor) -> None:
    y.view(torch.int16)[used] += 1


def larger(y: torch.Tensor, used: torch.Tensor) -> None:
    y[used] *= 1.1


def row_of_nobody(y: torch.Tensor, used: torch.Tensor) -> None:
    y[~used] = 0


def no_number(y: torch.Tensor, used: torch.Tensor) -> None:
    y[used.nonzero()[0].item()] = torch.nan


@pytest.mark.parametrize(
    ("change", "numbers", "words"),
    [
        (next_value, "exact", "sums that are exact differ"),
        (larger, "of any size", "farther off than rounding explains"),
        (row_of_nobody, "of any size", "a row of no expert was written"),
        (no_number, "of any size", "are NaN"),
    ],
)
def test_a_wrong_product_is_seen(
    monkeypatch: pytest.MonkeyPatch, change: Any, numbers: str, words: str
) -> None:
    values = {**ProductCase.of(0).values, "layout": "with gaps", "rows": "any", "experts": 5}
    case = ProductCase(3, {**values, "numbers": numbers})
    product = product_calls.grouped_product

    def wrong(*operands: Any, out: torch.Tensor) -> torch.Tensor:
        product(*operands, out=out)
        change(out, (out != product_calls.UNTOUCHED).any(-1))
        return out

    assert case.run() == ""
    monkeypatch.setattr(product_calls, "grouped_product", wrong)
    assert words in case.run()


@pytest.mark.parametrize(
    ("change", "words"),
    [(next_value, "call 0, rows"), (row_of_nobody, "a row of no expert was written")],
)
def test_a_wrong_result_of_grouped_experts_is_seen(
    monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    values = {**GroupedCase.of(0).values, "layout": "by expert", "rows": "any"}
    case = GroupedCase(3, "sm_90a", {**values, "weights": "bf16 x bf16", "shape": (4, 384, 128)})
    call = GroupedExperts.__call__

    def wrong(experts: GroupedExperts, *given: Any, out: torch.Tensor, **more: Any) -> torch.Tensor:
        call(experts, *given, out=out, **more)
        rows = out.view(-1, out.shape[-1])
        change(rows, (rows != UNTOUCHED).any(-1))
        return out

    assert case.run() == ""
    monkeypatch.setattr(GroupedExperts, "__call__", wrong)
    assert words in case.run()
