"""The module."""

from __future__ import annotations

import copy
import ctypes
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.formats.float_scaled import dequantize_e4m3_float, quantize_e4m3_float
from deep_moe.training.experts import Precision
from deep_moe.training.plain_steps import PlainSteps, mxfp8_rounded

from .plain_layer import Layer, assert_close, random_like


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


def _fused(parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()


def _foreach(parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(parameters, lr=0.1, foreach=True).step()


def _vector(parameters: list[torch.nn.Parameter]) -> None:
    both = torch.nn.utils.parameters_to_vector(parameters)
    torch.nn.utils.vector_to_parameters(2 * both, parameters)


def _pointer(parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        twice = (2 * p).detach()
        ctypes.memmove(p.data_ptr(), twice.data_ptr(), twice.nbytes)


@torch.no_grad()
def _uncounted(parameters: list[torch.nn.Parameter]) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):  # as FSDP does
        for p in parameters:
            p.mul_(2)


def _each(change: Callable[[torch.nn.Parameter], object]) -> Callable[..., None]:
    @torch.no_grad()
    def changed(parameters: list[torch.nn.Parameter]) -> None:
        for p in parameters:
            change(p)

    return changed


CHANGES: dict[str, Callable[[list[torch.nn.Parameter]], None]] = {
    "in place": _each(lambda p: p.mul_(2)),
    "fused optimizer": _fused,
    "foreach optimizer": _foreach,
    "data": _each(lambda p: p.data.mul_(2)),
    "new data": _each(lambda p: setattr(p, "data", p.data * 2)),
    "set": _each(lambda p: p.set_(p.detach() * 2)),
    "swapped": _each(lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(p * 2))),
    "detached": _each(lambda p: p.detach().mul_(2)),
    "a vector": _vector,
    "a pointer": _pointer,
    "without a version": _uncounted,
}


@pytest.mark.parametrize(("precision", "size"), [("mxfp8", 32), ("fp8", 128)])
@pytest.mark.parametrize("arch", [None, "sm_90a"])
@pytest.mark.parametrize("change", CHANGES)
def test_rounded_weights_are_those_of_now(
    change: str, arch: str | None, precision: Precision, size: int
) -> None:
    module = deep_moe.MoELayer(size, size, 3, precision=precision, arch=arch)
    layer = Layer.random(num_experts=3, hidden=size, intermediate=size)
    x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
    before = module(x, layer.topk_idx, weights).detach()
    CHANGES[change](list(module.parameters()))
    fresh = deep_moe.MoELayer(size, size, 3, precision=precision, arch=arch)
    with torch.no_grad():
        for own, other in zip(fresh.parameters(), module.parameters(), strict=True):
            own.copy_(other)
    expected = fresh(x, layer.topk_idx, weights)
    assert torch.equal(module(x, layer.topk_idx, weights), expected)
    assert not torch.equal(expected, before)


def test_mxfp8_in_a_call_of_other_weights() -> None:
    module, other = (deep_moe.MoELayer(32, 32, 3, precision="mxfp8") for _ in range(2))
    layer = Layer.random(num_experts=3, hidden=32, intermediate=32)
    args = (layer.tensors["x"], layer.topk_idx, layer.tensors["topk_weights"])
    own = module(*args)
    called = torch.func.functional_call(module, dict(other.named_parameters()), args)
    assert torch.equal(called, other(*args))
    assert torch.equal(module(*args), own)


@pytest.mark.parametrize(("precision", "step"), [("mxfp8", "round"), ("fp8", "quantize")])
def test_rounded_weights_are_not_kept(
    precision: Precision, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matrix at a time is held twice."""
    name = f"{step}_weights"
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    real = getattr(PlainSteps, name)

    def noted(self: PlainSteps, weights: torch.Tensor) -> Any:
        alive.append(sum(ref() is not None for ref in made))
        rounded = real(self, weights)
        made.append(weakref.ref(getattr(rounded, "values", rounded)))
        return rounded

    monkeypatch.setattr(PlainSteps, name, noted)
    Layer.random(hidden=128, intermediate=128, precision=precision).run()
    assert alive == [0, 0, 0]
    assert all(ref() is None for ref in made)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["process group", "all-to-all"])
def test_copies_share_the_group(group: dist.ProcessGroup, kind: str) -> None:
    shared: Any = group
    if kind == "all-to-all":
        shared = deep_moe.AllToAll(None, 8, 128, 3, 3, 64, expert_alignment=8)
    module = deep_moe.MoELayer(128, 32, 3, group=shared)
    layer = Layer.random(num_experts=3, hidden=128, intermediate=32)
    args = (layer.tensors["x"], layer.topk_idx, layer.tensors["topk_weights"])
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    for other in (copy.deepcopy(module), averaged.module):
        assert other.group is shared
        assert torch.equal(other(*args), module(*args))


def test_a_saved_layer_is_given_a_group_again(group: dist.ProcessGroup) -> None:
    module = deep_moe.MoELayer(16, 24, 3, group=group)
    layer = Layer.random(num_experts=3)
    args = (layer.tensors["x"], layer.topk_idx, layer.tensors["topk_weights"])
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for again in (loaded, copy.deepcopy(loaded)):
        with pytest.raises(RuntimeError, match=r"set layer\.group to a group of as many ranks"):
            again(*args)
    loaded.group = group
    assert torch.equal(loaded(*args), module(*args))
    with pytest.raises(TypeError, match=r"group must be a process group.*got int"):
        loaded.group = 2
    file = io.BytesIO()
    torch.save(deep_moe.MoELayer(16, 24, 3), file)
    file.seek(0)
    assert torch.load(file, weights_only=False).group is None


def fp8_rounded(values: torch.Tensor) -> torch.Tensor:
    return dequantize_e4m3_float(*quantize_e4m3_float(values), torch.float64)


def fp8_rounded_weights(weights: torch.Tensor) -> torch.Tensor:
    """Of one block for each expert."""
    blocks = weights.reshape(len(weights), 128 * 128)
    return dequantize_e4m3_float(
        *quantize_e4m3_float(blocks, whole_tokens=True), torch.float64
    ).view(weights.shape)


@pytest.mark.parametrize(
    ("precision", "size", "round_weights", "round_tokens"),
    [
        ("mxfp8", 32, PlainSteps().round_weights, mxfp8_rounded),
        ("fp8", 128, fp8_rounded_weights, fp8_rounded),
    ],
)
def test_rounded_values_are_multiplied(
    precision: Precision,
    size: int,
    round_weights: Callable[[torch.Tensor], torch.Tensor],
    round_tokens: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The forward pass is that of rounded tokens and weights, up to the activation's rounding; the
    gradients are those of the weights as they are."""
    layer = Layer.random(hidden=size, intermediate=size, num_tokens=30)
    quantized, bf16 = layer.run(precision=precision), layer.run()
    assert not torch.equal(quantized["out"], bf16["out"])
    # E4M3 rounds by up to 2^-4 of a value, 2^-5 / sqrt(3) on average; twice per product.
    error = (quantized["out"].float() - bf16["out"].float()).norm() / bf16["out"].float().norm()
    assert 0.01 < error < 0.1
    rounded = layer.double()
    for name in ("w1", "w3", "w2"):
        weights = layer.tensors[name]
        assert weights is not None
        rounded.tensors[name] = round_weights(weights.detach()).double()
    tokens = layer.tensors["x"]
    assert tokens is not None
    rounded.tensors["x"] = round_tokens(tokens.detach()).double()
    # What is left is the activation's rounding: one of the four.
    exact = rounded.plain()
    left = (quantized["out"].double() - exact).norm() / exact.norm()
    assert left < error / 1.5


# Percent of the float64 layer's results, as norms: half and 1.3 times what this layer has.
ERRORS = {
    "bf16": {"out": 0.4, "x": 0.4, "topk_weights": 0.3, "w1": 0.4, "w3": 0.4, "w2": 0.4},
    "fp8": {"out": 6.4, "x": 5.6, "topk_weights": 4.9, "w1": 7.2, "w3": 3.7, "w2": 5.4},
    "fp8_dgrad": {"out": 6.4, "x": 7.6, "topk_weights": 6.0, "w1": 8.1, "w3": 5.2, "w2": 5.4},
    "fp8_wgrad": {"out": 6.4, "x": 7.6, "topk_weights": 6.0, "w1": 8.9, "w3": 6.4, "w2": 6.6},
}


@pytest.mark.parametrize("precision", ERRORS)
def test_errors_beside_float64(precision: str) -> None:
    """As docs/training.md has them. "fp8_dgrad" adds what E4M3 rounds to the gradients of x and
    W1, and none to W2's; "fp8_wgrad" adds to those of all weights."""
    layer = Layer.random(num_tokens=256, num_experts=4, hidden=512, intermediate=256)
    exact = layer.double()
    out = exact.plain()
    d_out = random_like(out)
    wanted = {"out": out.detach(), **exact.gradients(out, d_out)}
    found = layer.run(d_out.bfloat16(), precision=precision)
    for name, percent in ERRORS[precision].items():
        error = 100 * (found[name].double() - wanted[name]).norm() / wanted[name].norm()
        assert percent / 2 < error < 1.3 * percent, name
