"""deep_moe.frozen_weights: fewer quantizations, the same bits, and no stale weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.training import kept_weights
from deep_moe.training.experts import FP8_DATA_GRADIENTS
from deep_moe.training.plain_steps import PlainSteps

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOKENS = 128, 256, 2, 6
PRECISIONS = ("fp8", "mxfp8", "fp8_dgrad", "fp8_wgrad")


def layer_of(precision: str, **options: bool) -> deep_moe.MoELayer:
    torch.manual_seed(0)
    return deep_moe.MoELayer(
        HIDDEN,
        INTERMEDIATE,
        NUM_EXPERTS,
        precision=precision,  # type: ignore[arg-type]
        **options,
    )


def run(layer: deep_moe.MoELayer, seed: int = 1) -> list[torch.Tensor]:
    """Output and gradients of a pass."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    topk_idx = torch.arange(2 * NUM_TOKENS).view(NUM_TOKENS, 2) % NUM_EXPERTS
    out = layer(x, topk_idx, torch.full((NUM_TOKENS, 2), 0.5))
    leaves = [x, *layer.parameters()]
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_same_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each quantization of a matrix, and for each comparison."""
    calls: list[str] = []
    names = ("quantize_weights", "quantize_weights_both_ways", "round_weights", "num_differences")
    for name in names:
        original = getattr(PlainSteps, name)

        def counting(steps, *given, original=original, name=name):
            calls.append("compared" if name == "num_differences" else "quantized")
            return original(steps, *given)

        monkeypatch.setattr(PlainSteps, name, counting)
    return calls


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", [{}, {"fuse_w1_w3": True}, {"recompute": True}])
def test_each_weight_is_quantized_once_and_compared_once(
    precision: str, options: dict[str, bool], counted: list[str]
) -> None:
    layer = layer_of(precision, **options)
    # Data gradients take weights in the other order, which the forward pass makes on the way unless
    # nothing is kept for the backward pass.
    is_apart = precision in FP8_DATA_GRADIENTS and layer.recompute
    num_copies = len(list(layer.parameters())) * (2 if is_apart else 1)
    wanted = [run(layer, seed) for seed in range(3)]
    counted.clear()
    with deep_moe.frozen_weights(layer):
        found = [run(layer, seed) for seed in range(3)]
        assert len(counted) == num_copies
    # "mxfp8" has no kernel that compares.
    again = "quantized" if precision == "mxfp8" else "compared"
    assert counted == ["quantized"] * num_copies + [again] * num_copies
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)
    run(layer)  # behind it anew
    assert len(counted) > 2 * num_copies
    assert not kept_weights._kept


def test_calls_of_both_precisions_have_copies_of_their_own() -> None:
    layer = layer_of("fp8")

    def call(precision: Any) -> torch.Tensor:
        x = torch.ones(NUM_TOKENS, HIDDEN).bfloat16()
        routing = torch.zeros(NUM_TOKENS, 1).long(), torch.ones(NUM_TOKENS, 1)
        return deep_moe.moe(x, *routing, layer.w1, layer.w3, layer.w2, precision=precision)

    wanted = [call(precision) for precision in PRECISIONS]
    assert not torch.equal(*wanted[:2])
    with deep_moe.frozen_weights(layer):
        assert_same_bits([call(precision) for precision in PRECISIONS], wanted)


def changed_in_place(layer: deep_moe.MoELayer) -> None:
    with torch.no_grad():
        layer.w2.mul_(-3)


def swapped(layer: deep_moe.MoELayer) -> None:
    layer.w2.data = -3 * layer.w2.data


@pytest.mark.parametrize("change", [changed_in_place, swapped])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_change_that_can_be_seen_is_heeded(precision: str, change) -> None:
    layer = layer_of(precision)
    with deep_moe.frozen_weights(layer):
        run(layer)
        change(layer)
        found = run(layer)
    assert_same_bits(found, run(layer))


def test_the_same_memory_in_another_order_is_another_weight() -> None:
    weight = torch.nn.Parameter(torch.arange(16.0).view(4, 4))
    kept = kept_weights.KeptWeight("weight", weight)

    def copied(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (weight.detach().clone(),)

    rounding = kept_weights.Rounding(copied, lambda weight, copies: (weight != copies[0]).sum())
    (before,) = kept.copy("kind", rounding)
    weight.data = weight.data.t()
    (after,) = kept.copy("kind", rounding)
    assert torch.equal(after, before.t())


def changed_unseen(layer: deep_moe.MoELayer) -> None:
    layer.w2.data.mul_(-3)


def stepped(layer: deep_moe.MoELayer) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer.w1.grad = layer.w3.grad = None  # type: ignore[union-attr]
    torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()


def loaded(layer: deep_moe.MoELayer) -> None:
    layer.load_state_dict({**layer.state_dict(), "w2": -3 * layer.w2.detach()})


def of_other_sizes(layer: deep_moe.MoELayer) -> None:
    layer.w2.data = layer.w2.data[:, :128]


@pytest.mark.parametrize(
    "change", [changed_unseen, stepped, loaded, changed_in_place, swapped, of_other_sizes]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_change_behind_the_last_pass_is_an_error(precision: str, change) -> None:
    layer = layer_of(precision)
    model = torch.nn.ModuleDict({"experts": layer})
    message = r"owners\[0\].experts.w2 changed within frozen_weights"

    def passes() -> None:
        with deep_moe.frozen_weights(model):
            run(layer)
            change(layer)

    with pytest.raises(RuntimeError, match=message):
        passes()
    assert not kept_weights._kept


def test_an_error_inside_is_not_hidden_and_nothing_is_left() -> None:
    layer = layer_of("fp8")

    def passes() -> None:
        with deep_moe.frozen_weights(layer):
            run(layer)
            changed_unseen(layer)
            raise KeyError

    with pytest.raises(KeyError):
        passes()
    assert not kept_weights._kept
    assert_same_bits(run(layer), run(layer))


def test_weights_of_the_function_are_frozen_by_themselves(counted: list[str]) -> None:
    w1, w3 = torch.randn(2, NUM_EXPERTS, HIDDEN, INTERMEDIATE).bfloat16()
    w2 = torch.randn(NUM_EXPERTS, INTERMEDIATE, HIDDEN).bfloat16()
    x = torch.randn(3, HIDDEN).bfloat16()
    given = (x, torch.zeros(3, 1).long(), torch.ones(3, 1), w1, w3, w2)
    with deep_moe.frozen_weights(w1, w2):
        outputs = [deep_moe.moe(*given, precision="fp8") for _ in range(2)]
        assert len(counted) == 2 + 2  # w3 is not frozen
    assert outputs[0].equal(outputs[1])


def test_a_compiled_layer_has_the_same_bits() -> None:
    layer = layer_of("fp8")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, topk_idx = torch.randn(3, HIDDEN).bfloat16(), torch.zeros(3, 1).long()
    with deep_moe.frozen_weights(layer):
        outputs = [module(x, topk_idx, torch.ones(3, 1)) for module in (layer, compiled, compiled)]
    assert all(output.equal(outputs[0]) for output in outputs)


class Subclass(torch.Tensor):
    pass


def test_what_cannot_be_frozen_is_refused() -> None:
    layer = layer_of("fp8")
    with pytest.raises(ValueError, match="got none"), deep_moe.frozen_weights():
        pass
    linear = torch.nn.Linear(1, 1)
    with (
        pytest.raises(ValueError, match=r"owners\[0\] must have a MoELayer inside; got Linear"),
        deep_moe.frozen_weights(linear),
    ):
        pass
    with (
        pytest.raises(TypeError, match=r"owners\[1\] must be a module or a tensor; got str"),
        deep_moe.frozen_weights(layer, "w1"),  # type: ignore[arg-type]
    ):
        pass
    subclass = layer.w1.detach().as_subclass(Subclass)
    with (
        pytest.raises(TypeError, match=r"owners\[0\] must be a plain tensor, .* got Subclass"),
        deep_moe.frozen_weights(subclass),
    ):
        pass
    with (
        deep_moe.frozen_weights(layer.w1),
        pytest.raises(ValueError, match=r"owners\[0\].w1 must not be frozen already"),
        deep_moe.frozen_weights(layer),
    ):
        pass
    assert not kept_weights._kept
