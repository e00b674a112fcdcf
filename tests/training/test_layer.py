"""The module."""

from __future__ import annotations

import torch

import deep_moe
from deep_moe.training.weight_cache import ROUNDED_WEIGHTS, WeightCache

from .plain_layer import Layer, assert_close


def test_it_is_the_call_with_its_parameters() -> None:
    module = deep_moe.MoELayer(16, 24, 5, biases=True, activation="swiglu_oai", activation_clamp=3)
    layer = Layer.random(activation="swiglu_oai", activation_clamp=3)
    x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
    layer.tensors |= dict(module.named_parameters())
    assert torch.equal(module(x, layer.topk_idx, weights), layer())
    assert sorted(module.state_dict()) == ["b1", "b2", "b3", "w1", "w2", "w3"]


def test_leading_dimensions_stay() -> None:
    module = deep_moe.MoELayer(16, 24, 5)
    layer = Layer.random(num_tokens=6)
    x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
    flat = module(x, layer.topk_idx, weights)
    out = module(x.view(2, 3, 16), layer.topk_idx.view(2, 3, 3), weights.view(2, 3, 3))
    assert torch.equal(out.view(6, 16), flat)


def test_checkpoints_are_transposed() -> None:
    generator = torch.Generator().manual_seed(0)
    l1 = torch.randn(5, 48, 16, generator=generator).bfloat16()
    l2 = torch.randn(5, 16, 24, generator=generator).bfloat16()
    x = torch.randn(7, 16, generator=generator).bfloat16()
    outs = []
    for fuse in (False, True):
        module = deep_moe.MoELayer(16, 24, 5, fuse_w1_w3=fuse)
        module.load_transposed(l1, l2)
        outs.append(module(x, torch.full((7, 1), 2), torch.ones(7, 1)))
    gate, up = (x.float() @ l1[2].float().t()).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up @ l2[2].float().t()
    assert_close({"out": outs[0]}, {"out": expected}, bound=4 * 2.0**-9)
    assert torch.equal(outs[0], outs[1])


def test_one_tensor_of_both_has_the_same_gradients() -> None:
    apart = Layer.random()
    joint = Layer(apart.topk_idx, dict(apart.tensors))
    joint.tensors["w1"] = (
        torch.cat([apart.tensors["w1"], apart.tensors["w3"]], 2).detach().requires_grad_()  # type: ignore[list-item]
    )
    joint.tensors["w3"] = None
    results, expected = joint.run(), apart.run()
    for name in ("out", "topk_weights", "w2"):
        assert torch.equal(results[name], expected[name])
    assert torch.equal(results["w1"], torch.cat([expected["w1"], expected["w3"]], 2))
    # One sum over both halves in place of two that are rounded.
    assert_close({"x": results["x"]}, {"x": expected["x"]}, bound=2.0**-8)


def test_rounded_weights_are_made_once_for_each_version() -> None:
    layer = Layer.random(hidden=32, intermediate=32, precision="mxfp8")
    before = len(ROUNDED_WEIGHTS)
    first = layer.run()
    assert len(ROUNDED_WEIGHTS) == before + 3
    w1 = layer.tensors["w1"]
    assert w1 is not None
    calls = []

    def never(weights: torch.Tensor) -> torch.Tensor:
        calls.append(weights)
        return weights

    ROUNDED_WEIGHTS.rounded(w1, never)
    assert not calls
    with torch.no_grad():
        w1.mul_(2)
    assert not torch.equal(layer.run()["out"], first["out"])
    ROUNDED_WEIGHTS.rounded(w1, never)
    assert not calls
    del w1
    layer.tensors.clear()
    assert len(ROUNDED_WEIGHTS) == before


def test_a_new_tensor_at_an_old_address_is_rounded_again() -> None:
    cache = WeightCache()
    made = []

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        made.append(1)
        return weights.clone()

    for value in range(3):
        weights = torch.full((1, 32, 2), float(value))
        assert (cache.rounded(weights, rounded) == value).all()
        del weights
    assert len(made) == 3
    assert len(cache) == 0


def test_mxfp8_multiplies_what_it_holds() -> None:
    """The forward pass is that of rounded tokens and weights, up to the activation's rounding; the
    gradients are those of the weights as they are."""
    layer = Layer.random(hidden=32, intermediate=32, num_tokens=30)
    mxfp8, bf16 = layer.run(precision="mxfp8"), layer.run()
    assert not torch.equal(mxfp8["out"], bf16["out"])
    # E4M3 rounds by up to 2^-4 of a value, 2^-5 / sqrt(3) on average; twice per product.
    error = (mxfp8["out"].float() - bf16["out"].float()).norm() / bf16["out"].float().norm()
    assert 0.01 < error < 0.1
    rounded = layer.double()
    from deep_moe.training.plain_steps import PlainSteps, mxfp8_rounded

    for name in ("w1", "w3", "w2"):
        weights = layer.tensors[name]
        assert weights is not None
        rounded.tensors[name] = PlainSteps().round_weights(weights.detach()).double()
    rounded.tensors["x"] = mxfp8_rounded(layer.tensors["x"].detach()).double()  # type: ignore[union-attr]
    # What is left is the activation's rounding: one of the four.
    exact = rounded.plain()
    left = (mxfp8["out"].double() - exact).norm() / exact.norm()
    assert left < error / 1.5
