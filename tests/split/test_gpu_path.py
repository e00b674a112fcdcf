"""What a GPU would be given: the launches, with a GPU that does nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.host_overhead import UndrivenGpu
from deep_moe.errors import MegaMoETimeoutError
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import LowLatencyArgs
from deep_moe.jit.status import StatusCode
from deep_moe.split.low_latency import LowLatencyAllToAll

Launched = list[tuple[str, int, bytes]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Kernel, CTAs and arguments of every launch."""
    launches: Launched = []

    class Recording(UndrivenGpu):
        def load(self, kernel: Any, **options: Any) -> Any:
            assert options["is_cooperative"]
            assert options["num_threads"] == 64

            class Launcher:
                def launch(self, args: CppStruct, num_ctas: int, stream: int) -> None:
                    launches.append((kernel.name, num_ctas, bytes(args)))

            return Launcher()

    gpu = Recording()
    monkeypatch.setattr("deep_moe.fused.rank_buffer.gpu_of", lambda _: gpu)
    monkeypatch.setattr("deep_moe.fused.loaded_kernels._launchers", BoundedCache(8))
    return launches


def make(**changes: Any) -> LowLatencyAllToAll:
    return LowLatencyAllToAll(None, 4, 128, 4, 2, device="cpu", **changes)


def test_each_call_is_one_launch_or_two(launched: Launched) -> None:
    layer = make()
    x, ids = torch.zeros(3, 128).bfloat16(), torch.full((3, 2), 9)  # ids that nobody looks at
    y, weights = torch.zeros(4, 4, 128).bfloat16(), torch.zeros(3, 2)
    for receive in (True, False):
        result = layer.dispatch(x, ids, receive=receive)
        if not receive:
            layer.receive(result.handle)
        layer.combine(y, ids, weights, result.handle, receive=receive)
        if not receive:
            layer.receive(result.handle)
    steps = [name.split("_")[2] for name, *_ in launched]
    assert steps == ["dispatch", "combine", "dispatch", "dispatch", "combine", "combine"]
    assert {num_ctas for _, num_ctas, _ in launched} == {132}
    args = LowLatencyArgs.from_buffer_copy(launched[0][2])
    assert (args.x, args.topk_idx, args.num_tokens) == (x.data_ptr(), ids.data_ptr(), 3)
    assert args.wait_timeout_ns == 60_000_000_000


def test_launches_do_not_change_from_call_to_call(launched: Launched) -> None:
    """So a graph may be replayed."""
    layer = make()
    x, ids = torch.zeros(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    results = [layer.dispatch(x, ids) for _ in range(3)]
    tensors = {
        "call_idx",
        "recv_count",
        "src_slots",
        "src_info",
        "layout_range",
        "sent_rows",
        "recv_x",
        "recv_scales",
    }
    for name, *_ in LowLatencyArgs._fields_:
        values = {str(bytes(memory_of(name, args))) for _, _, args in launched}
        assert len(values) == 1 or name in tensors
    assert len(results) == 3


def memory_of(name: str, args: bytes) -> bytes:
    field = getattr(LowLatencyArgs, name)
    return args[field.offset : field.offset + field.size]


def test_a_failure_shows_at_the_next_call(launched: Launched) -> None:
    layer = make()
    x, ids = torch.zeros(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    layer.dispatch(x, ids)
    layer.buffer.memory.status.code = StatusCode.TIMEOUT
    with pytest.raises(MegaMoETimeoutError):
        layer.check()
    layer.reset()
    layer.dispatch(x, ids)
    assert len(launched) == 2


def test_more_ctas_than_the_gpu_has_sms(launched: Launched) -> None:
    with pytest.raises(ValueError, match="num_sms must be at least 1 and at most 132, the SMs of"):
        make(num_sms=133)


def test_another_gpus_kernel(launched: Launched) -> None:
    with pytest.raises(ValueError, match=r"arch must be .*, or None; got 'sm_103a'"):
        make(arch="sm_103a")
