"""The layer's gradients: against finite differences and against autograd of the plain formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.formats.float_scaled import dequantize_e4m3_float, quantize_e4m3_float
from deep_moe.training.experts import Experts, Linear1
from deep_moe.training.rows import Rows

from .plain_layer import Layer, assert_close, assert_equal_bits, random_like

# BF16 rounds tokens' rows four times on the longest way, each time by at most 2^-9 of the value.
BF16_ERROR = 4 * 2.0**-9
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu with a clamp": {"activation_clamp": 0.5},
    "swiglu_oai with biases": {"activation": "swiglu_oai", "activation_clamp": 0.7, "biases": True},
    "situ in one tensor": {"activation": "situ", "fused": True},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def test_gradcheck(kind: dict[str, Any]) -> None:
    layer = Layer.random(dtype=torch.float64, **kind)
    names = [name for name, tensor in layer.tensors.items() if tensor is not None]

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        tensors = {**layer.tensors, **dict(zip(names, leaves, strict=True))}
        return Layer(layer.topk_idx, tensors, layer.options)()

    assert torch.autograd.gradcheck(call, [layer.tensors[name] for name in names], fast_mode=True)


@pytest.mark.parametrize("sizes", [(1, 1, 2, 3, 5), (13, 4, 7, 9, 11), (40, 2, 3, 17, 6)], ids=str)
def test_float64_is_the_plain_formula(kind: dict[str, Any], sizes: tuple[int, ...]) -> None:
    names = ("num_tokens", "num_topk", "num_experts", "hidden", "intermediate")
    sizes_by_name = dict(zip(names, sizes, strict=True))
    layer = Layer.random(dtype=torch.float64, **sizes_by_name, **kind)
    out = layer.plain()
    assert_close(layer.run(), {"out": out.detach(), **layer.gradients(out)}, bound=1e-13)


def test_bf16_is_the_plain_formula_but_for_rounding(kind: dict[str, Any]) -> None:
    layer = Layer.random(num_tokens=20, hidden=32, intermediate=40, **kind)
    expected = layer.double()
    out = expected.plain()
    # A value within rounding of a limit may fall on its other side, where the slope jumps.
    bound = 2 * BF16_ERROR if "activation_clamp" in kind else BF16_ERROR
    assert_close(layer.run(), {"out": out.detach(), **expected.gradients(out)}, bound)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad"])
def test_recomputed_is_bit_equal(precision: str) -> None:
    layer = Layer.random(hidden=128, intermediate=128, biases=True, precision=precision)
    assert_equal_bits(layer.run(), layer.run(recompute=True))


@pytest.mark.parametrize("fused", [False, True])
def test_only_x_routing_and_linear1_are_kept(fused: bool) -> None:
    sizes = {"num_tokens": 64, "num_topk": 4, "num_experts": 6, "hidden": 64, "intermediate": 512}
    layer = Layer.random(**sizes, fused=fused)
    x, values = 64 * 64 * 2, 2 * (64 * 4 + 6 * 8) * 512
    routing = 64 * 4 * 4 + (6 + 64 * 4 + (64 * 4 + 6 * 8)) * 4
    weights = [layer.tensors[name] for name in ("w1", "w3", "w2")]
    parameters = sum(weight.nbytes for weight in weights if weight is not None)
    cases: list[tuple[dict[str, bool], int]] = [
        ({}, values * 2),
        ({"quantize_kept": True}, values + values // 128 * 4),
        ({"recompute": True}, 0),
    ]
    for options, linear1 in cases:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(**options)
        assert sum(kept.values()) - parameters <= x + routing + linear1


@pytest.mark.parametrize("arch", [None, "sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", [{}, {"biases": True, "fused": True, "activation": "situ"}])
def test_quantized_linear1_is_what_gradients_see(
    kind: dict[str, Any], arch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the bits of a backward pass that is given it rounded."""
    layer = Layer.random(hidden=64, intermediate=128, **kind)
    exact, quantized = (layer.run(arch=arch, quantize_kept=kept) for kept in (False, True))
    assert torch.equal(quantized["out"], exact["out"])
    # E4M3 rounds by 2^-5 / sqrt(3) of a value on average.
    for name in ("x", "w1", "w2", "topk_weights"):
        error = (quantized[name] - exact[name]).double().norm() / exact[name].double().norm()
        assert 0.005 < error < 0.08, name

    def rounded(half: torch.Tensor | None) -> Any:
        return (
            half if half is None else dequantize_e4m3_float(*quantize_e4m3_float(half)).bfloat16()
        )

    real = Experts.backward

    def backward(self: Experts, *args: Any, **options: Any) -> Any:
        *others, linear1 = args
        given = Linear1(rounded(linear1.gate), rounded(linear1.up))
        return real(self, *others, given, **options)

    monkeypatch.setattr(Experts, "backward", backward)
    assert_equal_bits(layer.run(arch=arch), quantized)


def test_what_cannot_be_quantized_is_refused() -> None:
    layer = Layer.random(intermediate=128)
    with pytest.raises(ValueError, match="quantize_kept must be False with recompute"):
        layer(quantize_kept=True, recompute=True)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16 with quantize_kept"):
        layer.double()(quantize_kept=True)


def test_runs_are_bit_equal() -> None:
    layer = Layer.random(num_tokens=50)
    assert_equal_bits(layer.run(), layer.run())


@pytest.mark.parametrize("unused", [-1, 5, 2**40])
def test_unused_slots_have_zero_gradients(unused: int) -> None:
    layer = Layer.random()
    layer.topk_idx[2] = unused
    layer.topk_idx[3, 1] = unused
    results = layer.run()
    assert (results["out"][2] == 0).all()
    assert (results["x"][2] == 0).all()
    assert (results["topk_weights"][2] == 0).all()
    assert results["topk_weights"][3, 1] == 0
    assert (results["x"][3] != 0).any()


def test_routing_weights_of_zero_have_gradients() -> None:
    layer = Layer.random(biases=True)
    with torch.no_grad():
        layer.tensors["topk_weights"].zero_()  # type: ignore[union-attr]
    results = layer.run()
    expected = layer.double()
    out = expected.plain()
    gradient = expected.gradients(out)["topk_weights"]
    assert (results["out"] == 0).all()
    assert_close({"d": results["topk_weights"]}, {"d": gradient}, BF16_ERROR)


def test_experts_without_tokens_have_zero_gradients() -> None:
    results = Layer.random(biases=True).run()
    for name in ("w1", "w3", "w2", "b1", "b3", "b2"):
        assert (results[name][-1] == 0).all()  # random layers leave the last expert out
        assert (results[name][0] != 0).any()


@pytest.mark.parametrize("arch", [None, "sm_90a"])
def test_no_tokens(arch: str | None) -> None:
    layer = Layer.random(num_tokens=0, biases=True, arch=arch)
    results = layer.run()
    assert results["out"].shape == (0, 16)
    assert all((gradient == 0).all() for gradient in results.values())
    assert results["w1"].shape == (5, 16, 24)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad"])
def test_no_finite_value_stays_in_its_token(value: float, precision: str) -> None:
    layer = Layer.random(hidden=128, intermediate=128, precision=precision)
    layer.topk_idx[4, 0] = 1
    clean = layer.run()
    with torch.no_grad():
        layer.tensors["x"][4, 3] = value  # type: ignore[index]
    results = layer.run()
    others = torch.arange(7) != 4
    assert not results["out"][4].isfinite().all()
    for name in ("out", "x", "topk_weights"):
        assert torch.equal(results[name][others], clean[name][others]), name


def test_weights_that_are_not_finite_do_not_leak_through_padding() -> None:
    layer = Layer.random()
    with torch.no_grad():
        layer.tensors["w2"][0, 0, 0] = float("inf")  # type: ignore[index]
    results = layer.run()
    assert results["w1"][1:].isfinite().all()
    assert results["w2"][1:].isfinite().all()


def test_a_second_backward_pass_is_refused_as_pytorch_does() -> None:
    layer = Layer.random()
    out = layer()
    out.backward(random_like(out).bfloat16())
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(random_like(out).bfloat16())


def test_retained_graphs_go_backward_again() -> None:
    layer = Layer.random()
    out = layer()
    leaves = [tensor for tensor in layer.tensors.values() if tensor is not None]
    d_out = random_like(out).bfloat16()
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    second = torch.autograd.grad(out, leaves, d_out)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_gradients_are_refused() -> None:
    layer = Layer.random()
    (d_x,) = torch.autograd.grad(layer().sum(), [layer.tensors["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        d_x.sum().backward()


def test_only_wanted_gradients_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_moe.training import experts

    made: list[tuple[int, ...]] = []
    real = experts.grouped_weight_gradient

    def count(rows: torch.Tensor, d_rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        made.append(tuple(d_rows.shape))
        return real(rows, d_rows, offs)

    monkeypatch.setattr(experts, "grouped_weight_gradient", count)
    layer = Layer.random()
    full = layer.run()
    assert len(made) == 3
    frozen = {n: t if n == "x" or t is None else t.detach() for n, t in layer.tensors.items()}
    out = Layer(layer.topk_idx, frozen)()
    (d_x,) = torch.autograd.grad(out, [frozen["x"]], random_like(out).bfloat16())
    assert len(made) == 3
    assert torch.equal(d_x, full["x"])


def test_gradients_of_views_are_taken() -> None:
    """A sum's gradient is one value, expanded."""
    layer = Layer.random()
    (expanded,) = torch.autograd.grad(layer().sum(), [layer.tensors["x"]])
    whole = layer.gradients(layer(), torch.ones(7, 16))
    assert torch.equal(expanded, whole["x"])


@pytest.mark.parametrize("arch", [None, "sm_90a"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad"])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_may_be_stored_by_columns(fused: bool, precision: str, arch: str | None) -> None:
    """As [experts, out, in], of which transposed views are given."""
    sizes = {"hidden": 128, "intermediate": 128}
    layer = Layer.random(**sizes, fused=fused, precision=precision, arch=arch)
    expected = layer.run()
    for name in ("w1", "w3", "w2"):
        weights = layer.tensors[name]
        if weights is not None:
            stored = weights.detach().transpose(1, 2).contiguous().requires_grad_()
            layer.tensors[name] = stored.transpose(1, 2)
    # Only PyTorch's products may add in another order.
    assert_close(layer.run(), expected, 2.0**-9)


def test_seeds_mappings_follow_from_ours() -> None:
    """row_id, dest, offs_pad and gate_sorted of the single-GPU flow that the layer is built after,
    as docs/training.md derives them."""
    from deep_moe.training.plain_steps import PlainSteps

    topk_idx = torch.tensor([[2, 0], [0, -1], [2, 2]])
    gates = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    rows: Rows = PlainSteps().route(topk_idx, num_experts=3)
    is_row = rows.slot_of_row >= 0
    row_id = rows.slot_of_row[is_row].long()
    dest = is_row.nonzero().squeeze(1).int()
    gate_sorted = gates.view(-1)[row_id]
    assert row_id.tolist() == [1, 2, 0, 4, 5]  # slots by expert: 0, 0, 2, 2, 2
    assert dest.tolist() == [0, 1, 8, 9, 10]
    assert rows.offs.tolist() == [8, 8, 16]
    assert gate_sorted.tolist() == pytest.approx([0.2, 0.3, 0.1, 0.5, 0.6])
    assert torch.equal(rows.row_of_slot.view(-1)[row_id], dest)
