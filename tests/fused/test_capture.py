"""Calls that become part of a CUDA graph: what a call learnt may ask for another kernel, but a
capture is no time to load one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.host_overhead import SHAPE, Layers, UndrivenGpu, gpu_path_on_cpu
from deep_moe.fused import loaded_kernels
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.call_plan import CallPlan, prepare_call
from deep_moe.fused.gpu import Gpu
from deep_moe.fused.options import CallOptions
from deep_moe.heuristics import MoEShape
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.synthetic import Tokens, exact_tokens
from tests.layer.rank_layer import RankLayer, this_gpu


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_kernels, "_launchers", BoundedCache(256))


class CapturedGpu(UndrivenGpu):
    """Its stream is captured when tests say so. Counts the kernels that are loaded."""

    captures = False
    num_loads = 0

    def is_capturing(self) -> bool:
        return self.captures

    def load(self, *arguments: Any, **options: Any) -> Any:
        self.num_loads += 1
        return super().load(*arguments, **options)


class Calls:
    """Calls on the stand-in; `received` is what the kernel of the last one left for the host."""

    def __init__(self, gpu: CapturedGpu) -> None:
        self.gpu = gpu
        self.layers = Layers(SHAPE, 1, torch.device("cpu"))

    def plan(
        self, *, received: int, captured: bool = False, num_tokens: int = 64, **options: Any
    ) -> CallPlan:
        layers = self.layers
        layers.buffer.memory.status.received = received
        self.gpu.captures = captured
        y = layers.ys[0][:num_tokens]
        plan, _ = prepare_call(y, *layers.weights[0], layers.buffer, {}, CallOptions(**options))
        return plan

    @property
    def num_loads(self) -> int:
        return self.gpu.num_loads


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(loaded_kernels, "built_kernel", lambda config: None)  # nothing is compiled
    gpu = CapturedGpu()
    with gpu_path_on_cpu(gpu):
        yield Calls(gpu)


EVEN = 64 * SHAPE.num_topk
UNEVEN = EVEN | RECEIVED_UNEVENLY


@pytest.mark.parametrize(
    ("num_tokens", "learnt"), [(64, UNEVEN), (8, EVEN)], ids=["uneven", "more_tokens"]
)
def test_a_capture_takes_the_kernel_that_is_loaded(
    calls: Calls, num_tokens: int, learnt: int
) -> None:
    first = calls.plan(received=0, num_tokens=num_tokens)
    assert calls.plan(received=learnt, num_tokens=num_tokens, captured=True) is first
    assert calls.num_loads == 1


def test_after_a_capture_the_kernel_that_fits_is_loaded(calls: Calls) -> None:
    first = calls.plan(received=0)
    calls.plan(received=UNEVEN, captured=True)
    later = calls.plan(received=UNEVEN)
    assert calls.num_loads == 2
    assert later.config != first.config
    assert calls.plan(received=UNEVEN, captured=True) is later
    assert calls.plan(received=EVEN, captured=True) is first
    assert calls.num_loads == 2


def test_a_capture_takes_the_kernel_that_fits_if_another_call_loaded_it(calls: Calls) -> None:
    calls.plan(received=0)
    other = calls.plan(received=UNEVEN, timeout_s=1.0)
    captured = calls.plan(received=UNEVEN, captured=True)
    assert captured.launcher is other.launcher
    assert captured.wait_timeout_ns != other.wait_timeout_ns
    assert calls.num_loads == 2


def test_a_capture_takes_the_newest_of_several(calls: Calls) -> None:
    plans = [calls.plan(received=received, num_tokens=8) for received in (0, EVEN // 2)]
    assert calls.plan(received=EVEN, num_tokens=8, captured=True) is plans[-1]


@pytest.mark.parametrize("change", [{"num_tokens": 63}, {"timeout_s": 1.0}, {"fast_math": False}])
def test_a_capture_takes_no_other_calls_plan(calls: Calls, change: dict[str, Any]) -> None:
    calls.plan(received=0)
    captured = calls.plan(received=UNEVEN, captured=True, **change)
    assert calls.num_loads == 2
    assert calls.plan(received=UNEVEN, **change) is captured


def test_a_later_call_does_not_ask_whether_it_is_captured(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = calls.plan(received=0)
    monkeypatch.setattr(CapturedGpu, "is_capturing", lambda _: pytest.fail("asked"))
    assert calls.plan(received=0) is first
    assert calls.plan(received=EVEN) is first


GPU_SHAPE = MoEShape(
    num_ranks=1,
    num_experts=16,
    num_topk=2,
    hidden=512,
    intermediate_hidden=384,
    num_max_tokens_per_rank=512,
)


class LayerInGraphs(RankLayer):
    """A layer on the current GPU whose calls take all tokens, routed evenly or not."""

    def __init__(self) -> None:
        super().__init__(this_gpu(), GPU_SHAPE, exact=True)
        tokens = exact_tokens(GPU_SHAPE, 512)
        slots = torch.arange(1024).view(512, 2)
        uneven = torch.where(slots < 512, slots % 16, slots % 8)  # 96 and 32 tokens
        self.tokens = {
            name: Tokens(tokens.x, tokens.x_sf, topk_idx, tokens.topk_weights)
            for name, topk_idx in (("even", slots % 16), ("uneven", uneven))
        }
        self.results = {name: self.expected(tokens) for name, tokens in self.tokens.items()}
        self.y = self.new_y(512)

    def check(self, routing: str, run: Callable[[], None]) -> None:
        fill_inputs(self.buffer, self.tokens[routing])
        self.y.fill_(torch.nan)
        run()
        self.finish()
        assert torch.equal(self.y, self.results[routing])

    def call(self) -> None:
        self.launch(self.y)

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch(self.y)
        return graph


@pytest.fixture
def num_loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    loaded: list[object] = []
    load = Gpu.load

    def note(gpu: Gpu, kernel: Any, **options: Any) -> Any:
        loaded.append(kernel)
        return load(gpu, kernel, **options)

    monkeypatch.setattr(Gpu, "load", note)
    return lambda: len(loaded)


@pytest.mark.gpu
def test_a_graph_that_is_captured_after_an_uneven_call(num_loads: Callable[[], int]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's tile depends on how evenly tokens fall on the experts")
    layer = LayerInGraphs()
    layer.check("uneven", layer.call)
    assert layer.buffer.memory.status.received == 1024 | RECEIVED_UNEVENLY
    graphs = [layer.capture()]
    assert num_loads() == 1
    layer.check("uneven", layer.call)
    assert num_loads() == 2
    graphs.append(layer.capture())
    assert num_loads() == 2
    for graph in graphs:
        for routing in ("even", "uneven", "even"):
            layer.check(routing, graph.replay)


@pytest.mark.gpu
def test_a_kernel_is_loaded_within_a_capture_if_none_was_before(
    num_loads: Callable[[], int],
) -> None:
    layer = LayerInGraphs()
    graph = layer.capture()
    assert num_loads() == 1
    for routing in ("even", "uneven"):
        layer.check(routing, graph.replay)
