"""What is kept from call to call: a later launch gets the arguments that a first one would get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.fused.bounded_cache import BoundedCache

from .conftest import Target, routing

CPU = Target("cpu", None)
Launch = tuple[bytes, str, int, tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What the emulator would have run: arguments, kernel, grid and memory."""
    seen: list[Launch] = []

    def run(launches, **_: object) -> None:
        (launch,) = launches
        seen.append((bytes(launch.args), launch.kernel.key, launch.num_ctas, launch.memory))

    monkeypatch.setattr("deep_moe.fused.input_preparation.run_emulated", run)
    return seen


def use_cache(monkeypatch: pytest.MonkeyPatch, capacity: int = 64) -> BoundedCache:
    cache: BoundedCache = BoundedCache(capacity)
    monkeypatch.setattr("deep_moe.fused.input_preparation._plans", cache)
    return cache


@pytest.fixture
def calls() -> list[dict[str, Any]]:
    """No two of them may be taken for each other."""
    x = torch.randn(16, 256).bfloat16()
    idx, weights = routing(16, 2)
    buffer = CPU.buffer()
    usual = {"x": x, "topk_idx": idx, "topk_weights": weights, "sym_buffer": buffer}
    three = routing(16, 3)
    return [
        usual,
        {**usual, "x": x.clone()},
        {**usual, "topk_idx": idx.int()},
        {**usual, "topk_weights": weights.bfloat16()},
        {**usual, "arch": "sm_90a"},
        {**usual, "x": x[:5], "topk_idx": idx[:5], "topk_weights": weights[:5]},
        {**usual, "x": x[5:], "topk_idx": idx[5:], "topk_weights": weights[5:]},
        {**usual, "sym_buffer": CPU.buffer()},
        {
            **usual,
            "topk_idx": three[0],
            "topk_weights": three[1],
            "sym_buffer": CPU.buffer(num_topk=3),
        },
    ]


def test_a_later_launch_is_given_the_arguments_of_a_first_one(launches, calls, monkeypatch) -> None:
    for call in calls:
        use_cache(monkeypatch)
        deep_moe.prepare_inputs(**call)
    first = launches.copy()
    assert len(set(first)) == len(calls)
    launches.clear()
    use_cache(monkeypatch)
    for _ in range(2):
        for call in calls:
            deep_moe.prepare_inputs(**call)
    assert launches == 2 * first


def test_a_later_launch_checks_nothing_again(launches, calls, monkeypatch) -> None:
    use_cache(monkeypatch)
    deep_moe.prepare_inputs(**calls[0])

    def refuse(*_: object) -> None:
        pytest.fail("worked out a second time")

    monkeypatch.setattr("deep_moe.fused.input_preparation.check_inputs", refuse)
    deep_moe.prepare_inputs(**calls[1])
    with pytest.raises(pytest.fail.Exception, match="second time"):
        deep_moe.prepare_inputs(**calls[2])


def test_what_is_kept_is_bounded(launches, calls, monkeypatch) -> None:
    cache = use_cache(monkeypatch, capacity=2)
    for _ in range(2):
        for call in calls:
            deep_moe.prepare_inputs(**call)
    assert len(cache) == 2
    assert launches[: len(calls)] == launches[len(calls) :]
