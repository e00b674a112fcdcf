"""What benchmarks/training.py times, in small and on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import training

MODEL = training.Model(hidden=64, intermediate=32, num_experts=4, num_topk=2)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> training.Case:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    return training.Case.random(MODEL, 24, device="cpu")


def test_all_paths_run_and_agree(case: training.Case) -> None:
    paths = training.paths_of(case)
    training.check(case, paths)
    for path in paths.values():
        path()


def test_a_wrong_layer_is_not_timed(case: training.Case) -> None:
    paths = training.paths_of(case)
    other = replace(case, w2=(2 * case.w2).detach().requires_grad_())
    with pytest.raises(RuntimeError, match="out differs from the plain layer's"):
        training.check(case, {**paths, "ours": training.paths_of(other)["ours"]})


def test_products_are_counted_for_both_passes(case: training.Case) -> None:
    """Six products, each over gate and up, or half as large over down."""
    forward = 2 * 48 * 64 * (2 * 32) + 2 * 48 * 32 * 64
    assert case.flop == 3 * forward


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
