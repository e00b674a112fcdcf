"""The layer as PyTorch's operators: compilers see what runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import deep_moe
from deep_moe.activations import ACTIVATIONS, Situ, Swiglu
from deep_moe.training.operators import decode_activation, encode_activation, moe_op

from .plain_layer import Layer, assert_equal_bits


def arguments(layer: Layer, recompute: bool, quantize_kept: bool = False) -> tuple:
    t = layer.tensors
    activation = encode_activation(Swiglu())
    biases = (t.get("b1"), t.get("b3"), t.get("b2"))
    weights = (t["w1"], t["w3"], t["w2"])
    options = (activation, "bf16", None, recompute, quantize_kept)
    return (t["x"], layer.topk_idx, t["topk_weights"], *weights, *biases, *options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_fakes_agree_with_what_runs(recompute: bool, fused: bool) -> None:
    layer = Layer.random(biases=fused, fused=fused)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(moe_op, arguments(layer, recompute), test_utils=tests)


@pytest.mark.parametrize("fused", [False, True])
def test_fakes_agree_where_what_is_kept_is_quantized(fused: bool) -> None:
    layer = Layer.random(hidden=16, intermediate=128, fused=fused)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(moe_op, arguments(layer, False, quantize_kept=True), test_utils=tests)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad"])
def test_compiled_without_a_break(precision: str) -> None:
    layer = Layer.random(hidden=128, intermediate=128, biases=True, precision=precision)
    names = list(layer.tensors)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(*tensors: torch.Tensor | None) -> torch.Tensor:
        return Layer(layer.topk_idx, dict(zip(names, tensors, strict=True)), layer.options)()

    out = call(*layer.tensors.values())
    compiled = {"out": out.detach(), **layer.gradients(out)}
    assert_equal_bits(compiled, layer.run())


def test_compiled_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    module = deep_moe.MoELayer(16, 24, 5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (3, 9, 17):
        layer = Layer.random(num_tokens=num_tokens)
        x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
        out = compiled(x, layer.topk_idx, weights)
        assert torch.equal(out, module(x, layer.topk_idx, weights))
        out.sum().backward()


@pytest.mark.slow
def test_compiled_by_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its cache does not know what an operator takes, and may hold code of another version.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.fspath(tmp_path))
    torch._dynamo.reset()
    module = deep_moe.MoELayer(16, 24, 5)
    layer = Layer.random()

    def loss(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return module(x * 2, layer.topk_idx, weights).float().square().sum()

    results = []
    for call in (loss, torch.compile(loss, fullgraph=True)):
        module.zero_grad()
        value = call(layer.tensors["x"], layer.tensors["topk_weights"])
        value.backward()
        results.append((value.detach(), module.w1.grad, module.w2.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("kind", [own for own in ACTIVATIONS.values() if own.has_gate])
def test_activations_travel_whole(kind: type) -> None:
    for activation in (kind(), Situ(beta=0.1)):
        assert decode_activation(encode_activation(activation)) == activation
