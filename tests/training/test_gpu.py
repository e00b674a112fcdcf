"""The layer on a GPU: our kernels and PyTorch's grouped GEMM."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.training import launching
from deep_moe.training.kernel_steps import KernelSteps
from deep_moe.training.plain_steps import PlainSteps
from deep_moe.training.steps_for import steps_for

from .plain_layer import Layer, assert_close, assert_equal_bits, random_like

BF16_ERROR = 4 * 2.0**-9
# Of what comes of values that a GPU computed and then rounded to E4M3: its sums differ by the last
# bits, so that some values are rounded to the other neighbour. A difference of d rounds d / s of
# the values otherwise, by a step of s, and has sqrt(d * s) as a norm. d is BF16's 2^-9, s is E4M3's
# 2^-3.
E4M3_ERROR = BF16_ERROR + (2.0**-9 * 2.0**-3) ** 0.5
# The activation's output is rounded in the forward pass, Linear1's gradients in the backward pass.
OF_E4M3 = {"fp8": {"out"}, "fp8_dgrad": {"out", "x"}, "fp8_wgrad": {"out", "x", "w1", "w2"}}
SIZES = {"hidden": 256, "intermediate": 96}
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "biases": {"activation": "swiglu_oai", "biases": True},
    "one tensor": {"activation": "situ", "fused": True},
    "mxfp8": {"precision": "mxfp8", "biases": True},
    "quantized": {"quantize_kept": True, "intermediate": 128},
    "fp8": {"precision": "fp8", "biases": True, "intermediate": 128},
    "fp8_dgrad": {"precision": "fp8_dgrad", "fused": True, "intermediate": 128},
    "fp8_wgrad": {"precision": "fp8_wgrad", "fused": True, "intermediate": 128},
}


def on_gpu(layer: Layer) -> Layer:
    tensors = {
        name: None if t is None else t.detach().cuda().requires_grad_()
        for name, t in layer.tensors.items()
    }
    return Layer(layer.topk_idx.cuda(), tensors, layer.options)


def on_cpu(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in results.items()}


def assert_as_a_cpu(
    kind: str, ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        error = E4M3_ERROR if name in OF_E4M3.get(kind, ()) else BF16_ERROR
        assert_close({name: ours[name]}, {name: tensor}, error)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_it_is_what_a_cpu_makes(kind: str, num_tokens: int) -> None:
    """Experts without a token among them: the last one's gradients are zero."""
    layer = Layer.random(num_tokens=num_tokens, num_experts=9, **{**SIZES, **KINDS[kind]})
    d_out = random_like(layer())
    ours = on_cpu(on_gpu(layer).run(d_out.cuda()))
    assert_as_a_cpu(kind, ours, layer.run(d_out))
    assert (ours["w1"][-1] == 0).all()
    assert (ours["w2"][-1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_bit_equal(kind: str) -> None:
    layer = on_gpu(Layer.random(num_tokens=2000, num_experts=9, **{**SIZES, **KINDS[kind]}))
    d_out = random_like(layer()).cuda().bfloat16()
    expected = layer.run(d_out)
    for _ in range(5):
        assert_equal_bits(layer.run(d_out), expected)
    if not layer.options.get("quantize_kept"):  # of which nothing is made again
        assert_equal_bits(layer.run(d_out, recompute=True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("precision", ["mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad"])
def test_frozen_weights_have_the_same_bits_and_may_not_change(
    precision: str, by_columns: bool
) -> None:
    layer = on_gpu(
        Layer.random(
            num_tokens=300, num_experts=9, hidden=256, intermediate=384, precision=precision
        )
    )
    weights = [layer.tensors[name] for name in ("w1", "w3", "w2")]
    for weight in weights:
        assert weight is not None
        if by_columns:
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    d_out = random_like(layer()).cuda().bfloat16()
    expected = layer.run(d_out)
    with deep_moe.frozen_weights(*weights):  # type: ignore[arg-type]
        for _ in range(2):
            assert_equal_bits(layer.run(d_out), expected)
    for place in ((0, 0, 0), (8, -1, -1), (4, 128, 127)):

        def change(place: tuple[int, ...] = place) -> None:
            with deep_moe.frozen_weights(*weights):  # type: ignore[arg-type]
                layer.run(d_out)
                assert weights[2] is not None
                weights[2].data[place] += 8

        with pytest.raises(RuntimeError, match=r"^owners\[2\] changed within frozen_weights"):
            change()


@pytest.mark.gpu
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp8_dgrad", "fp8_wgrad"])
def test_accumulated_gradients_have_the_bits_of_pytorchs(precision: str, by_columns: bool) -> None:
    """And with float32 sums what they round to is close."""
    layer = on_gpu(
        Layer.random(
            num_tokens=300, num_experts=9, hidden=256, intermediate=384, precision=precision
        )
    )
    weights = {name: layer.tensors[name] for name in ("w1", "w3", "w2")}
    if by_columns:
        for weight in weights.values():
            assert weight is not None
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    d_out = random_like(layer()).cuda().bfloat16()

    def sums(num_passes: int, **options: bool) -> dict[str, torch.Tensor]:
        for weight in weights.values():
            assert weight is not None
            weight.grad = None
        for number in range(num_passes):
            layer(**options).backward(d_out * (number + 1))
        return {n: w.grad.clone() for n, w in weights.items() if w is not None}  # type: ignore[union-attr]

    expected = sums(3)
    assert_equal_bits(sums(3, fuse_wgrad_accumulation=True), expected)
    for weight in weights.values():
        assert weight is not None
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    for number in range(3):
        layer(fuse_wgrad_accumulation=True).backward(d_out * (number + 1))
    wide = {name: weight.main_grad for name, weight in weights.items()}  # type: ignore[union-attr]
    assert_close(wide, expected, 2.0**-7)


@pytest.mark.gpu
def test_many_slots_are_sorted() -> None:
    topk_idx = torch.randint(-1, 128, (32768, 8), generator=torch.Generator().manual_seed(0))
    steps = steps_for(torch.empty(1, 8, dtype=torch.bfloat16, device="cuda"), None)
    assert isinstance(steps, KernelSteps)
    ours, plain = steps.route(topk_idx.cuda(), 128), PlainSteps().route(topk_idx, 128)
    assert torch.equal(ours.offs.cpu(), plain.offs)
    assert torch.equal(ours.row_of_slot.cpu(), plain.row_of_slot)
    assert torch.equal(ours.slot_of_row.cpu(), plain.slot_of_row)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_host_waits(kind: str) -> None:
    layer = on_gpu(Layer.random(num_tokens=40, **{**SIZES, **KINDS[kind]}))
    d_out = random_like(layer()).cuda().bfloat16()
    layer.run(d_out)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run(d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_sees_other_routing_and_weights(kind: str) -> None:
    layer = on_gpu(Layer.random(num_tokens=40, **{**SIZES, **KINDS[kind]}))
    d_out = random_like(layer()).cuda().bfloat16()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.run(d_out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run(d_out)
    with torch.no_grad():
        layer.topk_idx.copy_(layer.topk_idx.roll(5, 0).clamp(max=2))
        layer.tensors["w2"].mul_(1.5)  # type: ignore[union-attr]
    graph.replay()
    torch.cuda.synchronize()
    assert_equal_bits(on_cpu(captured), on_cpu(layer.run(d_out)))


@pytest.mark.gpu
def test_compiled_without_a_break() -> None:
    module = deep_moe.MoELayer(64, 64, 5, device="cuda")
    layer = on_gpu(Layer.random(num_tokens=40, hidden=64, intermediate=64))
    x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
    compiled = torch.compile(module, fullgraph=True)
    out = compiled(x, layer.topk_idx, weights)
    assert torch.equal(out, module(x, layer.topk_idx, weights))
    out.float().square().sum().backward()
    assert module.w1.grad is not None


@pytest.mark.gpu
def test_gradcheck() -> None:
    layer = on_gpu(Layer.random(dtype=torch.float64, biases=True))
    given = {name: tensor for name, tensor in layer.tensors.items() if tensor is not None}
    names, leaves = list(given), list(given.values())

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        return Layer(layer.topk_idx, {**layer.tensors, **dict(zip(names, leaves, strict=True))})()

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.gpu
def test_another_architectures_kernels_are_refused() -> None:
    layer = on_gpu(Layer.random())
    own = torch.cuda.get_device_capability()
    with pytest.raises(ValueError, match="arch must be"):
        layer(arch="sm_100a" if own[0] == 9 else "sm_90a")


@pytest.mark.parametrize("kind", ["fp8", "fp8_dgrad", "fp8_wgrad"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_hoppers_sums_differ_from_a_cpus_no_more_than_that(
    kind: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated, with the bits that its tensor cores drop."""
    as_hardware = partial(launching.run_emulated, hopper_fp8_sums=True)
    monkeypatch.setattr(launching, "run_emulated", as_hardware)
    layer = Layer.random(num_tokens=num_tokens, num_experts=9, **{**SIZES, **KINDS[kind]})
    d_out = random_like(layer())
    ours, expected = layer.run(d_out, arch="sm_90a"), layer.run(d_out)
    assert not torch.equal(ours["out"], expected["out"])
    assert_as_a_cpu(kind, ours, expected)
