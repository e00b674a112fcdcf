"""Gradients are rounded where the design rounds them, and nowhere else on their way.

The reference computes in float64 and rounds to BF16 where the layer does. What is left are sums in
another order, so almost every value has equal bits; one rounding more changes a large part of them,
and is shown to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.activations import activation_of
from deep_moe.training.all_to_all import AllToAllWays
from deep_moe.training.plain_steps import PlainSteps
from deep_moe.training.process_group import ProcessGroupWays
from deep_moe.training.ways import LocalWays

from .plain_layer import Layer, random_like

SIZES = {"num_tokens": 24, "num_experts": 5, "hidden": 128, "intermediate": 40}


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().double()


def as_designed(layer: Layer, d_out: torch.Tensor, *, is_sent: bool) -> dict[str, torch.Tensor]:
    """Output and gradients, in float64. is_sent: rows are rounded once more to travel, with their
    bias or behind the sum of their two products."""
    t = {
        name: tensor.detach().double()
        for name, tensor in layer.tensors.items()
        if tensor is not None
    }
    d_out = rounded(d_out)
    activation = activation_of(layer.options.get("activation", "swiglu"))
    results = {name: torch.zeros_like(tensor) for name, tensor in t.items()}
    results["out"] = torch.zeros_like(d_out)
    for token, experts in enumerate(layer.topk_idx.tolist()):
        for k, e in enumerate(experts):
            if e < 0:
                continue
            x, weight, d_y = t["x"][token], t["topk_weights"][token, k], d_out[token]
            bias = {name: t[name][e] if name in t else 0.0 for name in ("b1", "b3", "b2")}
            gate = (rounded(x @ t["w1"][e]) + bias["b1"]).requires_grad_()
            up = (rounded(x @ t["w3"][e]) + bias["b3"]).requires_grad_()
            activated = activation(gate, up)
            y = rounded(rounded(activated.detach()) @ t["w2"][e]) + bias["b2"]
            results["out"][token] += weight * (rounded(y) if is_sent else y)
            d_activated = rounded(d_y @ t["w2"][e].t())
            d_gate, d_up = torch.autograd.grad(activated, (gate, up), d_activated * weight)
            d_gate, d_up, a = rounded(d_gate), rounded(d_up), activated.detach()
            results["topk_weights"][token, k] = (a * d_activated).sum() + (bias["b2"] * d_y).sum()
            row = rounded(d_gate @ t["w1"][e].t()) + rounded(d_up @ t["w3"][e].t())
            results["x"][token] += rounded(row) if is_sent else row
            results["w1"][e] += x.outer(d_gate)
            results["w3"][e] += x.outer(d_up)
            results["w2"][e] += rounded(a * weight).outer(d_y)
    return {name: v if name == "topk_weights" else rounded(v) for name, v in results.items()}


def check(layer: Layer, group: Any = None, *, is_sent: bool = False) -> None:
    d_out = random_like(layer())
    results = layer.run(d_out, group=group)
    expected = as_designed(layer, d_out, is_sent=is_sent)
    for name in ("out", "x", "w1", "w3", "w2"):
        share = float((results[name].double() == expected[name]).double().mean())
        assert share > 0.98, f"{name}: {share:.1%} of the values have equal bits"
    error = (results["topk_weights"].double() - expected["topk_weights"]).abs()
    # Float32's roundings of terms that may cancel; BF16's would be 2^-9.
    share = float((error <= 2.0**-16 * expected["topk_weights"].abs().mean()).double().mean())
    assert share > 0.9, f"topk_weights: {share:.1%} of the gradients are float32's"


@pytest.fixture(params=[{}, {"biases": True}], ids=["plain", "biases"])
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer.random(**SIZES, **request.param)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.fixture
def all_to_all() -> deep_moe.AllToAll:
    return deep_moe.AllToAll(None, 24, 128, 5, 3, 128, expert_alignment=8)


def test_on_one_rank(layer: Layer) -> None:
    check(layer)


def test_by_the_kernels(layer: Layer) -> None:
    layer.options["arch"] = "sm_90a"
    check(layer)


def test_over_a_process_group(layer: Layer, group: dist.ProcessGroup) -> None:
    check(layer, group, is_sent=True)


def test_over_an_all_to_all(layer: Layer, all_to_all: deep_moe.AllToAll) -> None:
    check(layer, all_to_all, is_sent=True)


def _result_rounded(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The result of a method is rounded to BF16 once more."""
    real = getattr(owner, name)

    def method(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = real(self, *args, **options)
        return result.bfloat16().to(result.dtype)

    return lambda patch: patch.setattr(owner, name, method)


def _sum_rounded(patch: pytest.MonkeyPatch) -> None:
    """The sum of a row's two products, before the sum over a token's rows."""
    real = PlainSteps.scatter

    def scatter(self: Any, first: Any, second: Any, rows: Any, **options: Any) -> torch.Tensor:
        total = first if second is None else first + second
        return real(self, total, None, rows, **options)

    patch.setattr(PlainSteps, "scatter", scatter)


def _rows_gradient_rounded(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the activation's output is weighted before it goes on."""
    real = PlainSteps.activate_backward

    def backward(self: Any, gate: Any, *args: Any, **options: Any) -> Any:
        weights = options["topk_weights"]
        options["topk_weights"] = weights.bfloat16().float()
        return real(self, gate, *args, **options)

    patch.setattr(PlainSteps, "activate_backward", backward)


def _activated_rounded(patch: pytest.MonkeyPatch) -> None:
    """The activation's output before its product with its gradient: that of routing weights."""
    real = PlainSteps.activate_backward

    def backward(
        self: Any, gate: Any, up: Any, biases: Any, activation: Any, rows: Any, **o: Any
    ) -> Any:
        weighted, d_weights = real(self, gate, up, biases, activation, rows, **o)
        a = self.activate(gate, up, biases, activation, rows).float()
        slots = rows.slot_of_row.long()
        d_weights.view(-1)[slots[slots >= 0]] = (a * o["d_activated"].float()).sum(1)[slots >= 0]
        return weighted, d_weights

    patch.setattr(PlainSteps, "activate_backward", backward)


LOCAL_BUGS = {
    "gradients of routing weights": _result_rounded(LocalWays, "return_weights"),
    "routing weights": _rows_gradient_rounded,
    "a row's two products": _sum_rounded,
    "activation": _activated_rounded,
}


@pytest.mark.parametrize("bug", LOCAL_BUGS)
def test_a_rounding_more_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LOCAL_BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError, match=r"have equal bits|are float32's"):
        check(Layer.random(**SIZES))


@pytest.mark.parametrize("name", ["return_weights", "receive_weights"])
@pytest.mark.parametrize("kind", ["process group", "all-to-all"])
def test_a_rounding_more_on_the_way_between_ranks_is_noticed(
    name: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_group = kind == "process group"
    _result_rounded(ProcessGroupWays if is_group else AllToAllWays, name)(monkeypatch)
    group = request.getfixturevalue("group" if is_group else "all_to_all")
    with pytest.raises(AssertionError, match=r"have equal bits|are float32's"):
        check(Layer.random(**SIZES), group, is_sent=True)
