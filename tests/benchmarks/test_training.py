"""What benchmarks/training.py times, in small and on a CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import quack_layer, training

MODEL = training.Model(hidden=128, intermediate=128, num_experts=4, num_topk=2)


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
    with pytest.raises(RuntimeError, match="ours: out differs from the plain layer's"):
        training.check(case, {**paths, "ours": training.paths_of(other)["ours"]})


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    cu_seqlens_m: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    A_idx: torch.Tensor | None = None,  # noqa: N803
    tuned: bool,
) -> torch.Tensor:
    """What QuACK's calls say that they do, without a GPU, in float32."""
    a, b = a.float(), b.float()
    if cu_seqlens_k is not None:
        columns = a if A_idx is None else a[:, A_idx]
        parts = [columns[:, i:j] @ b[i:j] for i, j in itertools.pairwise(cu_seqlens_k)]
        return torch.stack(parts).bfloat16()
    assert cu_seqlens_m is not None
    rows = a if A_idx is None else a[A_idx]
    spans = zip(itertools.pairwise(cu_seqlens_m), b, strict=True)
    return torch.cat([rows[i:j] @ weight for (i, j), weight in spans]).bfloat16()


def gated(
    a: torch.Tensor, b: torch.Tensor, *, activation: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    assert activation == "swiglu"
    linear1 = gemm(a, b, **options)
    gate, up = linear1[:, ::2], linear1[:, 1::2]
    return linear1, torch.nn.functional.silu(gate) * up


def dgated(
    a: torch.Tensor,
    b: torch.Tensor,
    linear1: torch.Tensor,
    *,
    activation: str,
    colvec_scale: torch.Tensor,
    colvec_reduce: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert activation == "swiglu"
    assert colvec_reduce
    d_activated = gemm(a, b, **options).float()
    pairs = linear1.detach().float().requires_grad_()
    with torch.enable_grad():
        activated = torch.nn.functional.silu(pairs[:, ::2]) * pairs[:, 1::2]
    weights = colvec_scale.unsqueeze(1)
    (d_linear1,) = torch.autograd.grad(activated, pairs, d_activated * weights)
    weighted = (activated.detach() * weights).bfloat16()
    return d_linear1.bfloat16(), weighted, (activated.detach() * d_activated).sum(1)


PRODUCTS = quack_layer.Products(gemm, gated, dgated)


def test_the_librarys_layer_agrees(case: training.Case) -> None:
    paths = training.paths_of(case) | training.library_paths(case, PRODUCTS)
    assert set(training.LIBRARY_PATHS) < set(paths)
    training.check(case, paths)


def test_a_wrong_result_of_the_library_is_not_timed(case: training.Case) -> None:
    def doubled(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return 2 * gemm(*tensors, **options)

    wrong = replace(PRODUCTS, gemm=doubled)
    paths = training.paths_of(case) | training.library_paths(case, wrong)
    with pytest.raises(RuntimeError, match="quack: out differs from the plain layer's"):
        training.check(case, paths)


def test_weights_are_stored_as_the_library_wants_them() -> None:
    w13 = torch.arange(2 * 3 * 8).view(2, 3, 8)  # columns 0 to 3 are W1's
    stored = quack_layer.interleaved(w13)
    assert stored.shape == (2, 8, 3)
    assert stored[0, :, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert quack_layer.separated(stored).equal(w13)


def test_products_are_counted_for_both_passes(case: training.Case) -> None:
    """Six products, each over gate and up, or half as large over down."""
    forward = 2 * 48 * 128 * (2 * 128) + 2 * 48 * 128 * 128
    assert case.flop == 3 * forward


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
