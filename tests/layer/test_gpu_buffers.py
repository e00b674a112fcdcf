"""Buffers between ranks: nothing beside them is written, a hundred leave nothing, layers share one,
and several live side by side."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_moe.fused.buffer import SymmBuffer
from deep_moe.fused.symm_memory import GUARD_BYTE, GUARD_BYTES, DeviceMemory
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.synthetic import Tokens
from tests.layer import routing
from tests.layer.conftest import ALL, RunRanks
from tests.layer.kernels import compile_all, gpu_config
from tests.layer.rank_layer import RankLayer, bits, make_buffer
from tests.layer.rank_pool import Place, Rank

pytestmark = pytest.mark.gpu

ALONE = pytest.param(Place.GPUS, 1, id="one_gpu")
TOGETHER = pytest.param(Place.GPUS, ALL, id="all_gpus")
SHARED = pytest.param(Place.SHARED_GPUS, 3, id="shared_gpus")


def on(*places: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("place", "num_ranks"), places)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What most tests call."""
    shapes = [
        make_shape(num_ranks, **sizes)
        for num_ranks in {1, torch.cuda.device_count(), 3}
        for sizes in ({}, {"hidden": 640, "num_topk": 2})
    ]
    compile_all(gpu_config(shape, n) for shape in shapes for n in range(101))


def make_shape(num_ranks: int, **sizes: int) -> MoEShape:
    defaults: dict[str, Any] = {
        "num_experts": 4 * num_ranks,
        "num_topk": 3,
        "hidden": 384,
        "intermediate_hidden": 256,
        "num_max_tokens_per_rank": 100,
    }
    return MoEShape(num_ranks=num_ranks, **{**defaults, **sizes})


def exact_tokens(layer: RankLayer, num_tokens: int, seed: int) -> Tokens:
    return routing.make_tokens(
        layer.shape, num_tokens, exact=True, seed=1000 * seed + layer.rank.idx
    )


def guarded_buffer(rank: Rank, shape: MoEShape) -> tuple[SymmBuffer, torch.Tensor]:
    """A buffer with guard bands on both sides, and all of that memory."""
    layout = symm_buffer_layout(shape)
    memory = DeviceMemory(
        rank.group,
        layout.num_bytes + 2 * GUARD_BYTES,
        GUARD_BYTES + layout.mark("control_bytes"),
        rank.device,
    )
    whole = memory.tensor
    for guard in (whole[:GUARD_BYTES], whole[-GUARD_BYTES:]):
        guard.fill_(GUARD_BYTE)
    memory.tensor = whole[GUARD_BYTES:-GUARD_BYTES]
    memory.addresses = [address + GUARD_BYTES for address in memory.addresses]
    memory.synchronize()
    rank.barrier()
    return SymmBuffer(shape, memory, rank.group), whole


def call_between_guards(rank: Rank) -> list[str]:
    """What was changed that should not have been."""
    shape = make_shape(rank.num_ranks)
    buffer, whole = guarded_buffer(rank, shape)
    layer = RankLayer(rank, shape, exact=True, buffer=buffer)
    weights = [tensor.clone() for pair in layer.weights for tensor in pair]
    rows = torch.full((300, shape.hidden), torch.nan, dtype=torch.bfloat16, device=rank.device)
    stats = torch.full((100,), -7, dtype=torch.int32, device=rank.device)
    changes = []
    for call_idx in range(12):
        num_tokens = (call_idx * 37 + rank.idx * 11) % 101
        tokens = exact_tokens(layer, num_tokens, seed=call_idx)
        fill_inputs(buffer, tokens)
        begin, end = buffer.layout["input_x"].offset, buffer.layout["l1_tokens"].offset
        inputs = buffer.memory.tensor[begin:end].clone()
        rows.fill_(torch.nan)
        y = rows[100 : 100 + num_tokens]
        own_stats = stats[50 : 50 + shape.num_experts_per_rank]
        layer.launch(y, cumulative_local_expert_recv_stats=own_stats)
        layer.finish()
        if not torch.equal(y, layer.expected(tokens)):
            changes.append(f"result of call {call_idx}")
        if not torch.equal(buffer.memory.tensor[begin:end], inputs):
            changes.append(f"inputs of call {call_idx}")
        if not rows[:100].isnan().all() or not rows[100 + num_tokens :].isnan().all():
            changes.append(f"rows beside y of call {call_idx}")
    if bool((stats[:50] != -7).any() or (stats[50 + shape.num_experts_per_rank :] != -7).any()):
        changes.append("beside the statistics")
    for name, guard in (("before", whole[:GUARD_BYTES]), ("behind", whole[-GUARD_BYTES:])):
        if bool((guard != GUARD_BYTE).any()):
            changes.append(f"{name} the buffer")
    now = [tensor for pair in layer.weights for tensor in pair]
    if not all(torch.equal(bits(a), bits(b)) for a, b in zip(weights, now, strict=True)):
        changes.append("weights")
    rank.barrier()
    return changes


@on(ALONE, TOGETHER, SHARED)
def test_nothing_beside_is_written(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    """B8: guard bands around the buffer, y and the statistics, over changing token counts."""
    for changes in run_ranks(place, num_ranks, call_between_guards):
        assert changes == []


def used_bytes(rank: Rank) -> int:
    """Of this process; of the whole GPU where symmetric memory is used, which PyTorch does not
    count."""
    gc.collect()
    rank.synchronize()
    torch.cuda.empty_cache()
    if rank.group is None:
        return torch.cuda.memory_allocated(rank.device)
    free, total = torch.cuda.mem_get_info(rank.device)
    return total - free


def create_and_destroy(rank: Rank, num_buffers: int) -> tuple[int, int, int]:
    """Bytes and open files that were added, and the size of one buffer."""
    shape = make_shape(rank.num_ranks, num_max_tokens_per_rank=2000)

    def use_one(call_idx: int) -> int:
        buffer = make_buffer(rank, shape)
        if call_idx % 20 == 0:
            layer = RankLayer(rank, shape, exact=True, buffer=buffer)
            tokens = exact_tokens(layer, 30, seed=call_idx)
            assert layer.compare_call(tokens).is_exact
        rank.barrier()  # nobody uses it any more
        buffer.close()
        return buffer.nbytes

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for call_idx in range(3):
        nbytes = use_one(call_idx)
    rank.barrier()
    before, files = used_bytes(rank), open_files()
    for call_idx in range(num_buffers):
        use_one(call_idx)
    rank.barrier()
    return used_bytes(rank) - before, open_files() - files, nbytes


@on(ALONE, TOGETHER)
def test_a_hundred_buffers_leave_nothing(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    """B9. What PyTorch keeps for later use may come and go, but not a hundred buffers."""
    for added, added_files, nbytes in run_ranks(place, num_ranks, create_and_destroy, 100):
        assert nbytes > 4 << 20
        assert added < 5 * nbytes
        assert added_files < 10


def share_a_buffer(rank: Rank) -> list[bool]:
    """Three layers one after the other, without a pause, then as one graph."""
    shape = make_shape(rank.num_ranks)
    buffer = make_buffer(rank, shape)
    layers = [RankLayer(rank, shape, exact=True, seed=i, buffer=buffer) for i in range(3)]
    ys = [layers[0].new_y(60) for _ in layers]

    def run_all() -> None:
        for layer, y in zip(layers, ys, strict=True):
            layer.launch(y)

    def are_right(tokens: Tokens) -> bool:
        layers[0].finish()
        return all(
            torch.equal(y, layer.expected(tokens)) for layer, y in zip(layers, ys, strict=True)
        )

    tokens = exact_tokens(layers[0], 60, seed=0)
    fill_inputs(buffer, tokens)
    for _ in range(3):
        run_all()
    answers = [are_right(tokens)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run_all()
    for seed in range(1, 4):
        tokens = exact_tokens(layers[0], 60, seed=seed)
        fill_inputs(buffer, tokens)
        for y in ys:
            y.fill_(torch.nan)
        graph.replay()
        answers.append(are_right(tokens))
    rank.barrier()
    return answers


@on(ALONE, TOGETHER, SHARED)
def test_layers_share_a_buffer(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    for answers in run_ranks(place, num_ranks, share_a_buffer):
        assert answers == [True] * 4


def use_several_buffers(rank: Rank) -> list[bool]:
    """Two shapes in turn, without a pause; then the first buffer is closed and the others go on."""
    layers = [
        RankLayer(rank, make_shape(rank.num_ranks), exact=True),
        RankLayer(rank, make_shape(rank.num_ranks, hidden=640, num_topk=2), exact=True),
        RankLayer(rank, make_shape(rank.num_ranks), exact=True, seed=1),
    ]
    inputs = [exact_tokens(layer, 70 - 9 * i, seed=i) for i, layer in enumerate(layers)]
    ys = [layer.new_y(tokens.num_tokens) for layer, tokens in zip(layers, inputs, strict=True)]
    for layer, tokens in zip(layers, inputs, strict=True):
        fill_inputs(layer.buffer, tokens)
    for _ in range(10):
        for layer, y in zip(layers, ys, strict=True):
            layer.launch(y)
    answers = []
    for layer, tokens, y in zip(layers, inputs, ys, strict=True):
        layer.finish()
        answers.append(torch.equal(y, layer.expected(tokens)))
    rank.barrier()
    layers[0].buffer.close()
    for layer, tokens in zip(layers[1:], inputs[1:], strict=True):
        answers.append(layer.compare_call(tokens).is_exact)
    rank.barrier()
    return answers


@on(ALONE, TOGETHER, SHARED)
def test_several_buffers(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    for answers in run_ranks(place, num_ranks, use_several_buffers):
        assert answers == [True] * 5


def take_half_of_the_sms(rank: Rank) -> list[bool]:
    """Two buffers on two streams at once, each with half of the SMs."""
    num_sms = torch.cuda.get_device_properties(rank.device).multi_processor_count // 4 * 2
    streams = [torch.cuda.Stream() for _ in range(2)]
    layers = [RankLayer(rank, make_shape(1), exact=True, seed=i) for i in range(2)]
    inputs = [exact_tokens(layer, 90, seed=i) for i, layer in enumerate(layers)]
    ys = [layer.new_y(90) for layer in layers]
    for layer, tokens in zip(layers, inputs, strict=True):
        fill_inputs(layer.buffer, tokens)
    rank.synchronize()
    for _ in range(50):
        for layer, y, stream in zip(layers, ys, streams, strict=True):
            with torch.cuda.stream(stream):
                layer.launch(y, num_sms=num_sms)
    answers = []
    for layer, tokens, y in zip(layers, inputs, ys, strict=True):
        layer.finish()
        answers.append(torch.equal(y, layer.expected(tokens)))
    return answers


def test_two_buffers_on_two_streams(run_ranks: RunRanks) -> None:
    assert run_ranks(Place.GPUS, 1, take_half_of_the_sms) == [[True, True]]


def use_fewer_sms(rank: Rank) -> list[bool]:
    layer = RankLayer(rank, make_shape(rank.num_ranks), exact=True)
    tokens = exact_tokens(layer, 80, seed=1)
    answers = []
    for num_sms in (2, 30, 64):
        comparison = layer.compare_call(tokens, num_sms=num_sms)
        answers.append(comparison.is_exact)
    rank.barrier()
    return answers


@on(ALONE, TOGETHER)
def test_fewer_sms(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    for answers in run_ranks(place, num_ranks, use_fewer_sms):
        assert answers == [True] * 3
