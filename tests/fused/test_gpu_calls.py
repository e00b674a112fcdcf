"""Calls on GPUs as programs make them: from several threads and streams, on several devices, in any
order of layers and sizes. Each result is that of the reference."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import deep_moe
from deep_moe import jit
from deep_moe.fused import call_plan, config_chooser, loaded_kernels
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.heuristics import MoEShape
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.synthetic import exact_tokens
from tests.layer.rank_layer import RankLayer, this_gpu

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 200_000_000  # about a tenth of a second


class FilledLayer(RankLayer):
    """A layer on the current GPU with its inputs in place. y holds NaN until a call has run."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        shape = MoEShape(
            num_ranks=1,
            num_experts=8,
            num_topk=2,
            hidden=512,
            intermediate_hidden=384,
            num_max_tokens_per_rank=num_tokens,
        )
        super().__init__(this_gpu(), shape, exact=True)
        tokens = exact_tokens(shape, num_tokens, seed=seed)
        fill_inputs(self.buffer, tokens)
        self.result = self.expected(tokens)
        self.y = self.new_y(num_tokens)
        self.rank.synchronize()

    def check(self, num_tokens: int | None = None) -> None:
        self.finish()
        assert torch.equal(self.y[:num_tokens], self.result[:num_tokens])
        assert num_tokens is None or bool(self.y[num_tokens:].isnan().all())
        self.y.fill_(torch.nan)


def test_layers_sizes_and_options_in_turn() -> None:
    layer = FilledLayer(96)
    zeros = (torch.zeros_like(layer.weights.l2[0]), torch.zeros_like(layer.weights.l2[1]))
    for _ in range(3):
        for num_tokens in (96, 1, 40):
            layer.launch(layer.y[:num_tokens])
            layer.check(num_tokens)
            layer.launch(layer.y[:num_tokens], overrides={"block_m": 32}, num_sms=30)
            layer.check(num_tokens)
        deep_moe.fp8_fp4_mega_moe(layer.y, layer.weights.l1, zeros, layer.buffer)
        assert not layer.y.any()
        layer.y.fill_(torch.nan)


def test_a_later_call_allocates_nothing_waits_for_nothing_and_runs_on_the_current_stream() -> None:
    layer = FilledLayer(64)
    stats = torch.zeros(layer.shape.num_experts, dtype=torch.int32, device="cuda")
    layer.launch(layer.y, cumulative_local_expert_recv_stats=stats)
    layer.check()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        layer.launch(layer.y, cumulative_local_expert_recv_stats=stats)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
        assert not stream.query()
        assert torch.cuda.default_stream().query()
    stream.synchronize()
    layer.check()


def test_no_call_behind_compile_ahead_compiles_loads_or_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens it has, whatever the experts received and how evenly, in graphs and
    outside, the preparation of its inputs too; and without `compile_ahead` the first call does."""
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loaded_kernels, "_launchers", BoundedCache(256))
    monkeypatch.setattr(call_plan, "_chosen", BoundedCache(64))
    loaded_kernels.built_kernel.cache_clear()
    layer = FilledLayer(96)
    deep_moe.compile_ahead(layer.buffer).wait(300)
    before = jit.kernel_counts()
    assert before.loaded >= 5  # those that prepare inputs among them
    monkeypatch.setattr(config_chooser, "choose_config", None)  # what would be called
    for num_tokens in (96, 1, 40, 0):
        layer.launch(layer.y[:num_tokens])
        layer.check(num_tokens)
    status = layer.buffer.memory.status
    for num_tokens in range(97):
        for flag in (0, RECEIVED_UNEVENLY):
            status.received = 2 * num_tokens | flag
            layer.launch(layer.y[:num_tokens])
    layer.finish()
    for ids in (torch.int32, torch.int64):
        for weights in (torch.float32, torch.bfloat16):
            x = torch.ones(3, 512, dtype=torch.bfloat16, device="cuda")
            slots = torch.zeros(3, 2, device="cuda")
            deep_moe.prepare_inputs(x, slots.to(ids), slots.to(weights), layer.buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(layer.y[:3])
    graph.replay()
    layer.finish()
    assert jit.kernel_counts() == before

    loaded_kernels._launchers.clear()
    loaded_kernels.built_kernel.cache_clear()
    layer.buffer.caches.clear()
    layer.launch(layer.y[:3])
    layer.finish()
    assert jit.kernel_counts() == before._replace(read=before.read + 1, loaded=before.loaded + 1)


def test_threads_with_a_buffer_each() -> None:
    """No thread has used CUDA before, and all share the kernel."""
    layers = [FilledLayer(64, seed=seed) for seed in range(3)]
    layers[0].launch(layers[0].y)
    layers[0].check()
    failures: list[BaseException] = []

    def work(layer: FilledLayer) -> None:
        try:
            for _ in range(50):
                layer.launch(layer.y)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for layer in layers:
        layer.check()


def test_two_buffers_on_two_streams() -> None:
    """Each call takes half of the SMs, so that both run at once, in whatever order."""
    layers = [FilledLayer(64, seed=seed) for seed in range(2)]
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count // 4 * 2
    streams = [torch.cuda.Stream() for _ in layers]
    for turn in range(20):
        pairs = list(zip(layers, streams, strict=True))
        for layer, stream in pairs if turn % 2 else reversed(pairs):
            with torch.cuda.stream(stream):
                layer.launch(layer.y, num_sms=num_sms)
    torch.cuda.synchronize()
    for layer in layers:
        layer.check()


def test_a_graph_sees_weights_that_were_replaced_in_place() -> None:
    layer = FilledLayer(64)
    for _ in range(2):
        layer.launch(layer.y)
        layer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(layer.y)
    own = [tensor.clone() for tensor in layer.weights.l2]
    for tensor in layer.weights.l2:
        tensor.zero_()
    graph.replay()
    assert not layer.y.any()
    for tensor, values in zip(layer.weights.l2, own, strict=True):
        tensor.copy_(values)
    layer.y.fill_(torch.nan)
    graph.replay()
    layer.check()


def test_devices_of_one_process() -> None:
    """Whatever device is current, a call runs on that of its buffer."""
    num_devices = min(torch.cuda.device_count(), 2)
    if num_devices < 2:
        pytest.skip(f"needs 2 GPUs; there are {torch.cuda.device_count()}")
    layers = []
    for device in range(num_devices):
        with torch.cuda.device(device):
            layers.append(FilledLayer(64, seed=device))
    assert [layer.buffer.device.index for layer in layers] == [0, 1]
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for layer in (*layers, *reversed(layers)):
                layer.launch(layer.y)
                torch.cuda.synchronize(layer.buffer.device)
                layer.check()
                assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match="y must be on cuda:0, as the buffer is; got cuda:1"):
        layers[0].launch(layers[1].y)
    with pytest.raises(ValueError, match=r"weights.l1\[0\] must be on cuda:0"):
        deep_moe.mega_moe(layers[0].y, layers[1].weights, layers[0].buffer)


def test_a_buffer_is_made_again_and_again() -> None:
    for seed in range(5):
        layer = FilledLayer(32, seed=seed)
        layer.launch(layer.y)
        layer.check()
        layer.buffer.close()
        with pytest.raises(ValueError, match="open buffer"):
            layer.launch(layer.y)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda y: y.cpu(), ValueError, "y must be on cuda:0, as the buffer is; got cpu"),
        (lambda y: y.float(), TypeError, "y must be torch.bfloat16"),
        (lambda y: y.T.contiguous().T, ValueError, "y must be contiguous"),
        (lambda y: y[:, :128], ValueError, "y must have shape"),
        (lambda y: torch.cat([y, y]), ValueError, "y must have at most"),
        (lambda y: y.flatten()[1:-511].view(-1, 512), ValueError, "multiple of 16 bytes"),
    ],
)
def test_a_later_call_is_refused_as_a_first_one(change, error, message: str) -> None:
    layer = FilledLayer(32)
    layer.launch(layer.y)
    layer.check()
    with pytest.raises(error, match=message):
        layer.launch(change(layer.y))
    layer.launch(layer.y)
    layer.check()
