"""fuse_wgrad_accumulation: the sums that PyTorch would make, in `main_grad` or `.grad`, and by name
what they cannot be for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deep_moe
from deep_moe.training import experts, kernel_steps

from .plain_layer import Layer, assert_close, assert_equal_bits, random_like

PRECISIONS = ("bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad")
WEIGHTS = ("w1", "w3", "w2")
SIZES = {"hidden": 128, "intermediate": 128, "num_experts": 3}


def leaves(layer: Layer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in layer.tensors.items() if tensor is not None}


def weights_of(layer: Layer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in leaves(layer).items() if name in WEIGHTS}


def backward(layer: Layer, num_passes: int, **options: Any) -> dict[str, torch.Tensor]:
    """`.grad` of all leaves after passes of different gradients of the output."""
    for seed in range(num_passes):
        out = layer(**options)
        out.backward(random_like(out, seed).to(out))
    return {name: tensor.grad for name, tensor in leaves(layer).items()}  # type: ignore[misc]


def forget(layer: Layer) -> None:
    for tensor in leaves(layer).values():
        tensor.grad = None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_have_the_bits_of_pytorchs(precision: str, fused: bool, recompute: bool) -> None:
    layer = Layer.random(**SIZES, fused=fused, biases=True, precision=precision)
    expected = backward(layer, 3, recompute=recompute)
    forget(layer)
    assert_equal_bits(
        backward(layer, 3, recompute=recompute, fuse_wgrad_accumulation=True), expected
    )


def test_kernels_add_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, of weights by rows and by columns, and where `.grad` begins at an odd place, which
    no kernel adds to."""
    layer = Layer.random(
        **SIZES, precision="fp8_wgrad", arch="sm_90a", fuse_wgrad_accumulation=True
    )
    stored = {n: w.detach().mT.contiguous().requires_grad_() for n, w in weights_of(layer).items()}
    adding: list[bool] = []
    real = kernel_steps.sum_rows

    def noted(*given: Any, adds: bool = False) -> None:
        adding.append(adds)
        real(*given, adds=adds)

    monkeypatch.setattr(kernel_steps, "sum_rows", noted)
    before = {
        name: random_like(weight, seed=5).bfloat16() for name, weight in weights_of(layer).items()
    }

    def pass_of(grads: dict[str, torch.Tensor], owners: dict[str, torch.Tensor]) -> None:
        for name, owner in owners.items():
            owner.grad = grads[name]
            layer.tensors[name] = owner if owner is not stored.get(name) else owner.mT
        out = layer()
        out.backward(random_like(out).to(out))

    rows = {name: gradient.clone() for name, gradient in before.items()}
    pass_of(rows, weights_of(layer))
    odd = {name: torch.empty(g.numel() + 1).bfloat16()[1:].view_as(g) for name, g in before.items()}
    for name, gradient in odd.items():
        gradient.copy_(before[name])
    pass_of(odd, weights_of(layer))
    columns = {name: gradient.mT.contiguous() for name, gradient in before.items()}
    pass_of(columns, stored)
    assert adding == [True] * 3 + [False] * 3 + [True] * 3
    assert_equal_bits(odd, rows)
    assert_equal_bits({name: gradient.mT for name, gradient in columns.items()}, rows)
    for name, gradient in rows.items():
        assert not torch.equal(gradient, before[name])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_main_grad_in_float32_is_what_is_added_to(precision: str) -> None:
    """It keeps what BF16 would round away: sums of equal gradients lose nothing."""
    layer = Layer.random(**SIZES, precision=precision)
    once = backward(layer, 1)
    forget(layer)
    for weight in weights_of(layer).values():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    for _ in range(3):
        backward(layer, 1, fuse_wgrad_accumulation=True)
    for name, weight in weights_of(layer).items():
        assert weight.grad is None
        # A product that adds itself does not even round its own sum to BF16.
        bound = 2.0**-9 if precision == "fp8_wgrad" else 1e-6
        assert_close({name: weight.main_grad}, {name: 3 * once[name].float()}, bound)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [{}, {"fused": True, "biases": True}], ids=str)
def test_sums_are_those_of_float64(kind: dict[str, Any]) -> None:
    """Of two passes, where `.grad` is there before the first one."""
    layer = Layer.random(dtype=torch.float64, num_tokens=13, **kind)
    expected: dict[str, torch.Tensor] = {}
    for seed in range(2):
        out = layer.plain()
        for name, gradient in layer.gradients(out, random_like(out, seed)).items():
            expected[name] = expected.get(name, 0) + gradient
    for weight in weights_of(layer).values():
        weight.grad = torch.zeros_like(weight)
    assert_close(backward(layer, 2, fuse_wgrad_accumulation=True), expected, 1e-13)


def accumulated(layer: Layer, step: Callable[[dict[str, Any]], object]) -> dict[str, torch.Tensor]:
    """`.grad` after a first pass and this step, of calls with these options."""
    forget(layer)
    backward(layer, 1, **layer.options)
    step(layer.options)
    return {name: tensor.grad.clone() for name, tensor in leaves(layer).items()}  # type: ignore[union-attr]


def same_as_pytorch(layer: Layer, step: Callable[[Layer], object]) -> None:
    plain = accumulated(layer, lambda _: step(layer))
    layer.options["fuse_wgrad_accumulation"] = True
    assert_equal_bits(accumulated(layer, lambda _: step(layer)), plain)


def checkpointed(layer: Layer, *, use_reentrant: bool) -> None:
    names = list(leaves(layer))

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return Layer(layer.topk_idx, dict(zip(names, tensors, strict=True)), layer.options)()

    out = checkpoint(call, *leaves(layer).values(), use_reentrant=use_reentrant)
    out.backward(random_like(out, 3).to(out))


def used_twice(layer: Layer) -> None:
    out = layer()
    again = Layer(layer.topk_idx, {**layer.tensors, "x": out}, layer.options)()
    again.backward(random_like(again, 3).to(again))


def with_a_penalty(layer: Layer) -> None:
    """A weight's gradient also comes from elsewhere."""
    w2 = layer.tensors["w2"]
    assert w2 is not None
    out = layer()
    (out.float().sum() + w2[0].float().square().sum()).backward()


def retained(layer: Layer) -> None:
    out = layer()
    out.backward(random_like(out, 3).to(out), retain_graph=True)
    out.backward(random_like(out, 4).to(out))


def for_one_weight(layer: Layer) -> None:
    out = layer()
    inputs = [layer.tensors["w1"], layer.tensors["x"]]
    out.backward(random_like(out, 3).to(out), inputs=inputs)


def for_tokens_alone(layer: Layer) -> None:
    out = layer()
    torch.autograd.grad(out, [layer.tensors["x"]], random_like(out, 3).to(out))


def saved_elsewhere(layer: Layer) -> None:
    with torch.autograd.graph.save_on_cpu():
        out = layer()
    out.backward(random_like(out, 3).to(out))


STEPS: dict[str, Callable[[Layer], object]] = {
    "checkpoint": lambda layer: checkpointed(layer, use_reentrant=False),
    "reentrant checkpoint": lambda layer: checkpointed(layer, use_reentrant=True),
    "retained": retained,
    "for one weight": for_one_weight,
    "for tokens alone": for_tokens_alone,
    "saved elsewhere": saved_elsewhere,
}


@pytest.mark.parametrize("precision", ["bf16", "fp8_wgrad"])
@pytest.mark.parametrize("step", STEPS)
def test_it_is_pytorchs_sum(step: str, precision: str) -> None:
    same_as_pytorch(Layer.random(**SIZES, precision=precision), STEPS[step])


def test_a_compiler_breaks_its_graph_at_the_layer() -> None:
    compiled = torch.compile(backward, backend="eager")
    same_as_pytorch(Layer.random(), lambda layer: compiled(layer, 1))


@pytest.mark.parametrize("step", [used_twice, with_a_penalty])
def test_several_gradients_of_a_weight_are_added_in_another_order(
    step: Callable[[Layer], object],
) -> None:
    """PyTorch adds them to one another first."""
    layer = Layer.random(dtype=torch.float64)
    plain = accumulated(layer, lambda _: step(layer))
    layer.options["fuse_wgrad_accumulation"] = True
    assert_close(accumulated(layer, lambda _: step(layer)), plain, 1e-13)


def test_no_product_is_made_for_weights_that_nobody_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Layer.random(fuse_wgrad_accumulation=True)
    made: list[str] = []
    real = experts.grouped_weight_gradient

    def noted(*given: torch.Tensor) -> torch.Tensor:
        made.append("product")
        return real(*given)

    monkeypatch.setattr(experts, "grouped_weight_gradient", noted)
    for_tokens_alone(layer)
    for name in WEIGHTS:
        weight = layer.tensors[name]
        assert weight is not None
        layer.tensors[name] = weight.detach()
    backward_of_others = layer().sum()
    backward_of_others.backward()
    assert not made
    assert layer.tensors["x"].grad is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("arch", [None, "sm_90a"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_tokens_add_nothing(precision: str, arch: str | None) -> None:
    layer = Layer.random(**SIZES, num_tokens=0, precision=precision, arch=arch)
    for weight in weights_of(layer).values():
        weight.grad = torch.ones_like(weight)
    found = backward(layer, 1, fuse_wgrad_accumulation=True)
    assert all((found[name] == 1).all() for name in WEIGHTS)


def test_layers_have_it() -> None:
    layer = deep_moe.MoELayer(128, 128, 3, precision="fp8_wgrad", fuse_wgrad_accumulation=True)
    plain = deep_moe.MoELayer(128, 128, 3, precision="fp8_wgrad")
    plain.load_state_dict(layer.state_dict())
    given = Layer.random(**SIZES)
    x, weights = given.tensors["x"], given.tensors["topk_weights"]
    for module in (layer, plain):
        module.w1.main_grad = torch.zeros_like(module.w1)  # type: ignore[attr-defined]
        for _ in range(2):
            module(x, given.topk_idx, weights).sum().backward()
    assert layer.w1.grad is None
    assert torch.equal(layer.w1.main_grad, plain.w1.grad)  # type: ignore[attr-defined]
    assert torch.equal(layer.w2.grad, plain.w2.grad)  # type: ignore[arg-type]


# Who is refused, when, and the words.


def hooked(method: str) -> Callable[[Layer], None]:
    def add(layer: Layer) -> None:
        getattr(layer.tensors["w2"], method)(lambda _: None)

    return add


def of_a_view(layer: Layer) -> None:
    layer.tensors["w3"] = layer.tensors["w3"][:]  # type: ignore[index]


def of_a_result(layer: Layer) -> None:
    layer.tensors["w3"] = 2 * layer.tensors["w3"]  # type: ignore[operator]


BEFORE_FORWARD = {
    "register_hook": (hooked("register_hook"), "w2 must have no hooks of register_hook"),
    "register_post_accumulate_grad_hook": (
        hooked("register_post_accumulate_grad_hook"),
        "w2 must have no hooks of register_post_accumulate_grad_hook",
    ),
    "a view": (of_a_view, r"w3 must be a leaf, or leaf.transpose\(1, 2\)"),
    "a result": (of_a_result, r"w3 must be a leaf, .*; got what <MulBackward0"),
}


@pytest.mark.parametrize("case", BEFORE_FORWARD)
def test_what_cannot_be_added_is_refused_by_the_call(case: str) -> None:
    layer = Layer.random(fuse_wgrad_accumulation=True)
    change, words = BEFORE_FORWARD[case]
    change(layer)
    with pytest.raises(ValueError, match=words):
        layer()


def ask_for_a_weight(layer: Layer) -> None:
    torch.autograd.grad(layer().sum(), [layer.tensors["x"], layer.tensors["w1"]])


def ask_for_a_graph(layer: Layer) -> None:
    layer().sum().backward(create_graph=True)


def hook_later(layer: Layer) -> None:
    out = layer()
    hooked("register_hook")(layer)
    out.sum().backward()


def with_main_grad(value: Any) -> Callable[[Layer], None]:
    def run(layer: Layer) -> None:
        layer.tensors["w2"].main_grad = value  # type: ignore[union-attr]
        layer().sum().backward()

    return run


BACKWARD: dict[str, tuple[Callable[[Layer], None], type[Exception], str]] = {
    "autograd.grad": (ask_for_a_weight, RuntimeError, "autograd.grad gets no gradient of w1"),
    "create_graph": (ask_for_a_graph, RuntimeError, "create_graph must be False"),
    "a later hook": (hook_later, ValueError, "w2 must have no hooks of register_hook"),
    "no tensor": (with_main_grad(3), TypeError, "main_grad of w2 must be a dense tensor; got int"),
    "another type": (
        with_main_grad(torch.zeros(5, 24, 16).half()),
        TypeError,
        "main_grad of w2 must be torch.bfloat16 or torch.float32; got torch.float16",
    ),
    "another shape": (
        with_main_grad(torch.zeros(5, 16, 24)),
        ValueError,
        r"main_grad of w2 must have shape \(5, 24, 16\); got \(5, 16, 24\)",
    ),
    "another device": (
        with_main_grad(torch.zeros(5, 24, 16, device="meta")),
        ValueError,
        "main_grad of w2 must be on cpu; got meta",
    ),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_what_cannot_be_added_is_refused_by_the_backward_pass(case: str) -> None:
    """And nothing was added before."""
    layer = Layer.random(fuse_wgrad_accumulation=True)
    for name in ("w1", "w3"):
        layer.tensors[name].grad = torch.zeros_like(layer.tensors[name])  # type: ignore[union-attr, arg-type]
    run, error, words = BACKWARD[case]
    with pytest.raises(error, match=words):
        run(layer)
    for name in ("w1", "w3"):
        assert not layer.tensors[name].grad.any()  # type: ignore[union-attr]


def test_without_gradients_nobody_is_refused() -> None:
    layer = Layer.random(fuse_wgrad_accumulation=True)
    hooked("register_hook")(layer)
    with torch.no_grad():
        layer()


def test_serving_refuses_it() -> None:
    layer = Layer.random(fuse_wgrad_accumulation=True, forward="serving")
    with pytest.raises(
        ValueError, match="fuse_wgrad_accumulation must be False with forward='serv"
    ):
        layer()
