"""The operator: what it declares, under compilers, and before the call that reads its output."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.formats.block_scaled import quantize_e4m3_ue8m0
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.trial.synthetic import exact_layer

from .conftest import VIEWS, Target, bits, routing

CPU = Target("cpu", None)


class Model(torch.nn.Module):
    """Prepares inputs twice, so that order matters, and returns what the buffer holds then."""

    def __init__(self, buffer: SymmBuffer) -> None:
        super().__init__()
        self.buffer = buffer

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        deep_moe.prepare_inputs(x * 2, topk_idx, topk_weights, self.buffer)
        first = self.buffer.x_sf[:4] + 0
        deep_moe.prepare_inputs(x, topk_idx + 1, topk_weights * 2, self.buffer)
        return (
            first,
            self.buffer.x_sf[:4] + 0,
            self.buffer.topk_idx[:4] + 0,
            self.buffer.topk_weights[:4] + 0,
        )


class MoE(torch.nn.Module):
    """What a model does with the router's output."""

    def __init__(self, buffer: SymmBuffer) -> None:
        super().__init__()
        self.buffer = buffer
        layer = exact_layer(buffer.shape)
        self.weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2)

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        deep_moe.prepare_inputs(x, topk_idx, topk_weights, self.buffer)
        y = torch.empty_like(x)
        deep_moe.fp8_fp4_mega_moe(y, *self.weights, self.buffer)
        return y * 1


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 256, generator=generator).bfloat16(), *routing(4, 2)


def check(buffer: SymmBuffer, result: tuple[torch.Tensor, ...]) -> None:
    x, idx, weights = inputs()
    values, sf = quantize_e4m3_ue8m0(x)
    assert torch.equal(result[0], quantize_e4m3_ue8m0(x * 2)[1])
    assert not torch.equal(result[0], sf)
    for got, expected in zip(result[1:], (sf, idx + 1, weights * 2), strict=True):
        assert torch.equal(got, expected)
    for name, expected in zip(VIEWS, (values, sf, idx + 1, weights * 2), strict=True):
        assert torch.equal(bits(getattr(buffer, name)[:4]), bits(expected)), name


def test_a_compiled_model_writes_the_buffer_in_order() -> None:
    buffer = CPU.buffer()
    compiled = torch.compile(Model(buffer), fullgraph=True, backend="aot_eager")
    check(buffer, compiled(*inputs()))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_call_reads_what_was_prepared(is_compiled: bool) -> None:
    """The result is, bit for bit, that of a buffer which was filled by copies."""
    model = MoE(CPU.buffer())
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    x, idx, weights = inputs()
    y = call(x, idx.int(), weights)

    copied = CPU.buffer()
    for name, rows in zip(VIEWS, (*quantize_e4m3_ue8m0(x), idx, weights), strict=True):
        getattr(copied, name)[:4].copy_(rows)
    expected = torch.empty_like(x)
    deep_moe.fp8_fp4_mega_moe(expected, *model.weights, copied)
    assert torch.equal(y, expected)
    assert torch.equal(y.any(dim=1), (idx >= 0).any(dim=1))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_runs(strict: bool) -> None:
    buffer = CPU.buffer()
    program = torch.export.export(Model(buffer), inputs(), strict=strict)
    names = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert names.count(torch.ops.deep_moe.prepare_inputs.default) == 2
    x, idx, weights = inputs()
    first, sf, expected_idx, expected_weights = program.module()(x, idx, weights)
    assert torch.equal(first, quantize_e4m3_ue8m0(x * 2)[1])
    assert torch.equal(sf, quantize_e4m3_ue8m0(x)[1])
    assert torch.equal(expected_idx, idx + 1)
    assert torch.equal(expected_weights, weights * 2)


def test_the_schema_says_what_is_written() -> None:
    schema = torch.ops.deep_moe.prepare_inputs.default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == [
        "input_x",
        "input_x_sf",
        "input_topk_idx",
        "input_topk_weights",
        "expert_load",
    ]
    assert not schema.returns


@pytest.mark.gpu
def test_a_captured_launch_replays_with_other_inputs() -> None:
    target = Target("cuda", None)
    buffer = target.buffer()
    static = [tensor.cuda() for tensor in inputs()]
    deep_moe.prepare_inputs(*static, buffer)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_moe.prepare_inputs(*static, buffer)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 256, generator=generator).bfloat16()
        idx, weights = routing(4, 2, seed)
        for tensor, new in zip(static, (x, idx, weights), strict=True):
            tensor.copy_(new)
        graph.replay()
        for name, expected in zip(VIEWS, (*quantize_e4m3_ue8m0(x), idx, weights), strict=True):
            assert torch.equal(bits(getattr(buffer, name)[:4]), bits(expected)), name


@pytest.mark.gpu
def test_the_launch_waits_for_nothing_and_runs_on_the_current_stream() -> None:
    buffer = Target("cuda", None).buffer()
    x, idx, weights = (tensor.cuda() for tensor in inputs())
    x.mul_(1)  # the first launch of a kernel loads it, and loading may wait for the device
    deep_moe.prepare_inputs(x, idx, weights, buffer)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        x.mul_(4)
        deep_moe.prepare_inputs(x, idx, weights, buffer)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(buffer.x_sf[:4].cpu(), quantize_e4m3_ue8m0(x.cpu())[1])
