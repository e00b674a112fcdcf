"""There is no backward pass: a gradient that is asked for is refused, not silently none."""

from __future__ import annotations

import pytest
import torch

import deep_moe

REFUSED = r"must not require a gradient: the layer has no backward pass; .*torch\.no_grad\(\)"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", lambda *_, **__: None)
    monkeypatch.setattr("deep_moe.fused.input_preparation.run_emulated", lambda *_, **__: None)


def test_an_output_that_requires_a_gradient(example) -> None:
    y = example.y.clone().requires_grad_()
    with pytest.raises(ValueError, match=f"y {REFUSED}"):
        example(y=y)
    with torch.no_grad():
        example(y=y)


@pytest.mark.parametrize("view", ["x", "topk_weights"])
def test_inputs_that_were_written_with_a_gradient(example, view: str) -> None:
    buffer = example.sym_buffer
    values = torch.rand(getattr(buffer, view).shape, requires_grad=True)
    address = getattr(buffer, view).data_ptr()
    for _ in range(2):
        getattr(buffer, view).copy_(values.to(getattr(buffer, view).dtype))
        with pytest.raises(ValueError, match=rf"sym_buffer\.{view} {REFUSED}"):
            example()
    assert getattr(buffer, view).data_ptr() == address
    with torch.no_grad():
        getattr(buffer, view).copy_(values)
    example()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_nobody_asks_for_one(example, mode) -> None:
    weights = torch.rand(16, 2, requires_grad=True)
    with mode():
        example.sym_buffer.topk_weights.copy_(weights)
        example()


def test_expert_weights_may_be_parameters(example) -> None:
    """As frameworks make them; their gradient is asked for by nobody who calls this."""
    layer = example.layer
    l1, l2 = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch="sm_90a")
    factors = torch.nn.Parameter(l1.sf)
    assert factors.requires_grad
    example(l1_weights=(l1.weight, factors), l2_weights=l2, arch="sm_90a")


@pytest.mark.parametrize("name", ["x", "topk_weights"])
def test_inputs_that_are_prepared(example, name: str) -> None:
    tensors = {
        "x": torch.randn(4, 256, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(4, 2, dtype=torch.int64),
        "topk_weights": torch.ones(4, 2),
    }
    deep_moe.prepare_inputs(**tensors, sym_buffer=example.sym_buffer)
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} {REFUSED}"):
        deep_moe.prepare_inputs(**tensors, sym_buffer=example.sym_buffer)
    with torch.no_grad():
        deep_moe.prepare_inputs(**tensors, sym_buffer=example.sym_buffer)


def test_a_compiled_model_is_told_too(example) -> None:
    def model(y: torch.Tensor) -> None:
        example(y=y)

    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match=f"y {REFUSED}"):
        compiled(example.y.clone().requires_grad_())
