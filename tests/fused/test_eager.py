"""Calls go straight to their kernel only where nothing would see an operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode

from deep_moe.fused import eager
from deep_moe.fused.eager import is_seen_by_nobody


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def tensors() -> tuple[torch.Tensor, ...]:
    return torch.zeros(4), torch.nn.Parameter(torch.zeros(4))


def test_nothing_sees_an_ordinary_call(tensors) -> None:
    assert is_seen_by_nobody(tensors)
    with torch.inference_mode():
        assert is_seen_by_nobody(tensors)
    with torch.no_grad():
        assert is_seen_by_nobody((tensors[0].clone().requires_grad_(),))


def within(transform: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> bool:
    answers: list[bool] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        answers.append(is_seen_by_nobody((x,)) or is_seen_by_nobody((torch.zeros(4),)))
        return x * 2

    transform(ask)
    (answer,) = set(answers)
    return answer


@pytest.mark.parametrize(
    "transform",
    [
        lambda ask: torch.func.vmap(ask)(torch.zeros(4)),
        lambda ask: torch.func.functionalize(ask)(torch.zeros(4)),
        lambda ask: torch.jit.trace(ask, torch.zeros(4), check_trace=False),
        lambda ask: torch.fx.experimental.proxy_tensor.make_fx(ask)(torch.zeros(4)),
    ],
    ids=["vmap", "functionalize", "trace", "make_fx"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_see_calls(transform) -> None:
    assert within(transform) is False


def test_modes_and_subclasses_see_calls(tensors) -> None:
    with FunctionMode():
        assert not is_seen_by_nobody(tensors)
    assert not is_seen_by_nobody((*tensors, torch.zeros(4).as_subclass(Subclass)))


def test_a_profile_names_the_call(example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", lambda *_, **__: None)
    example()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        example()
    assert "deep_moe::mega_moe" in [event.name for event in profile.events()]


def test_an_ordinary_call_is_no_operator(example, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("called the operator")

    launches: list[object] = []
    monkeypatch.setattr(
        "deep_moe.fused.emulated_call.run_emulated", lambda *_, **__: launches.append(1)
    )
    monkeypatch.setattr("deep_moe.fused.mega_moe._mega_moe_op", refuse)
    example()
    assert len(launches) == 1
    monkeypatch.setattr(eager, "_can_ask", False)
    with pytest.raises(pytest.fail.Exception, match="called the operator"):
        example()
