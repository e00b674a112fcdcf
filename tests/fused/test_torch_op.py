"""The call as a PyTorch operator: visible to torch.compile and torch.export, and right there."""

import pytest
import torch

import deep_moe
from deep_moe.activations import SwigluOai, activation_of
from deep_moe.fused.buffer import SymmBuffer


class Recorder:
    """Stands for the emulator: checks what the kernel would read, writes y and the statistics."""

    def __init__(self, example) -> None:
        self.example = example
        self.num_calls = 0

    def __call__(self, launches, **_) -> None:
        self.num_calls += 1
        (launch,) = launches
        buffer, tokens = self.example.sym_buffer, self.example.tokens
        n = launch.args.num_tokens
        assert torch.equal(buffer.x[:n].view(torch.uint8), tokens.x[:n].view(torch.uint8))
        assert torch.equal(buffer.x_sf[:n], tokens.x_sf[:n])
        assert torch.equal(buffer.topk_idx[:n], tokens.topk_idx[:n])
        assert torch.equal(buffer.topk_weights[:n], tokens.topk_weights[:n])
        for region in launch.memory:
            if region.name == "y":
                torch.frombuffer(memory_of(region), dtype=torch.bfloat16).fill_(self.num_calls)
            if region.name == "cumulative_local_expert_recv_stats":
                torch.frombuffer(memory_of(region), dtype=torch.int32).add_(1)


def memory_of(region):
    import ctypes

    return (ctypes.c_char * region.num_bytes).from_address(region.address)


class Layer(torch.nn.Module):
    """What a model does: fill the buffer, call, use y."""

    def __init__(self, example, **options) -> None:
        super().__init__()
        self.buffer = example.sym_buffer
        self.options = options
        self.weights = example.l1_weights, example.l2_weights

    def forward(self, x, x_sf, topk_idx, topk_weights, stats):
        n = x.shape[0]
        self.buffer.x[:n].copy_(x)
        self.buffer.x_sf[:n].copy_(x_sf)
        self.buffer.topk_idx[:n].copy_(topk_idx)
        self.buffer.topk_weights[:n].copy_(topk_weights)
        y = torch.empty(n, self.buffer.shape.hidden, dtype=torch.bfloat16)
        deep_moe.fp8_fp4_mega_moe(y, *self.weights, self.buffer, stats, **self.options)
        return y * 2


@pytest.fixture
def recorder(example, monkeypatch) -> Recorder:
    recorder = Recorder(example)
    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", recorder)
    # What the model must write itself.
    buffer = example.sym_buffer
    for view in (buffer.x.view(torch.uint8), buffer.x_sf, buffer.topk_idx, buffer.topk_weights):
        view.zero_()
    return recorder


def inputs(example) -> tuple[torch.Tensor, ...]:
    tokens = example.tokens
    stats = torch.zeros(4, dtype=torch.int32)
    return tokens.x, tokens.x_sf, tokens.topk_idx, tokens.topk_weights, stats


def test_a_compiled_model_writes_the_buffer_and_reads_y(example, recorder) -> None:
    compiled = torch.compile(Layer(example), fullgraph=True, backend="aot_eager")
    arguments = inputs(example)
    assert bool((compiled(*arguments) == 2).all())
    assert bool((compiled(*arguments) == 4).all())
    assert recorder.num_calls == 2
    assert arguments[-1].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "situ"},
        {"activation": "swiglu_oai", "activation_clamp": 3.0},
        {"activation": SwigluOai(alpha=1.5)},
    ],
)
def test_a_compiled_model_keeps_its_activation(example, recorder, monkeypatch, options) -> None:
    chosen = []
    compiled = torch.compile(Layer(example, **options), fullgraph=True, backend="aot_eager")
    run = recorder.__call__

    def look(launches, **others) -> None:
        chosen.append(launches[0].config.activation)
        run(launches, **others)

    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", look)
    assert bool((compiled(*inputs(example)) == 2).all())
    assert chosen == [activation_of(options["activation"], options.get("activation_clamp"))]


def test_a_compiled_call_that_accumulates_is_given_what_y_held(example, recorder, monkeypatch):
    def add_one(launches, **_) -> None:
        (launch,) = launches
        assert launch.config.accumulate
        (region,) = [region for region in launch.memory if region.name == "y"]
        torch.frombuffer(memory_of(region), dtype=torch.bfloat16).add_(1)

    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", add_one)
    layer = Layer(example)

    def model(x):
        y = x * 3
        deep_moe.fp8_fp4_mega_moe(y, *layer.weights, layer.buffer, accumulate=True)
        return y * 2

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.ones(5, layer.buffer.shape.hidden, dtype=torch.bfloat16)
    assert bool((compiled(x) == 8).all())


def test_two_layers_in_one_graph_share_a_buffer(example, recorder) -> None:
    layer = Layer(example)

    def model(*arguments):
        return layer(*arguments) + layer(*arguments)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert bool((compiled(*inputs(example)) == 2 * 1 + 2 * 2).all())


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_runs(example, recorder, strict: bool) -> None:
    program = torch.export.export(Layer(example), inputs(example), strict=strict)
    names = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.deep_moe.mega_moe.default in names
    assert recorder.num_calls == 0
    arguments = inputs(example)
    assert bool((program.module()(*arguments) == 2).all())
    assert arguments[-1].tolist() == [1, 1, 1, 1]


def test_an_exported_model_without_its_buffer_says_so(example, recorder) -> None:
    program = torch.export.export(Layer(example), inputs(example), strict=False).module()
    handle = example.sym_buffer.handle
    example.sym_buffer.close()
    with pytest.raises(ValueError, match=f"open buffer; handle {handle} is closed"):
        program(*inputs(example))


def test_the_schema_says_what_is_written() -> None:
    schema = torch.ops.deep_moe.mega_moe.default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["y", "cumulative_local_expert_recv_stats"]
    assert not schema.returns


def test_the_operator_takes_the_buffers_own_views_without_a_copy(
    example, recorder, monkeypatch
) -> None:
    buffer: SymmBuffer = example.sym_buffer
    module = Layer(example)

    def no_copy(*_: object) -> None:
        pytest.fail("copied a view onto itself")

    module(*inputs(example))
    monkeypatch.setattr(torch.Tensor, "copy_", no_copy)
    deep_moe.fp8_fp4_mega_moe(example.y, example.l1_weights, example.l2_weights, buffer)
    assert recorder.num_calls == 2
