"""A buffer is used by one thread at a time: a second one is told so at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import deep_moe
from benchmarks.host_overhead import SHAPE, Layers, UndrivenGpu, UndrivenLauncher, gpu_path_on_cpu
from deep_moe.errors import DeepMoEError
from deep_moe.fused import loaded_kernels
from deep_moe.fused.bounded_cache import BoundedCache

BUSY = "sym_buffer is in use by another thread; let one thread at a time call"


class Gate:
    """Stands for the emulator, or a launch, which takes until `open` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, *_: object, **__: object) -> None:
        self.entered.set()
        assert self.open.wait(30)


@contextmanager
def in_another_thread(call: Callable[[], object], gate: Gate) -> Iterator[None]:
    """While `call` is at the gate. What it raises, is raised here afterwards."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert gate.entered.wait(30)
        yield
    finally:
        gate.open.set()
        thread.join()
    assert not errors


def test_a_second_thread_is_refused_at_once(example, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", gate)
    buffer = example.sym_buffer
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    idx, weights = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    with in_another_thread(example, gate):
        for use in (
            example,
            buffer.reset,
            buffer.close,
            lambda: deep_moe.prepare_inputs(x, idx, weights, buffer),
        ):
            with pytest.raises(DeepMoEError, match=BUSY):
                use()
    example()
    buffer.close()


def test_a_call_that_is_refused_or_fails_gives_the_buffer_back(example, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("broken")

    with pytest.raises(ValueError, match="num_sms"):
        example(num_sms=3)
    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", fail)
    with pytest.raises(OSError, match="broken"):
        example()
    monkeypatch.undo()
    example.sym_buffer.reset()
    example()
    assert torch.equal(example.y, example.expected())


def test_a_second_thread_is_refused_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_kernels, "_launchers", BoundedCache(256))
    monkeypatch.setattr(loaded_kernels, "built_kernel", lambda config: None)
    with gpu_path_on_cpu(UndrivenGpu()):
        layers = Layers(SHAPE, 1, torch.device("cpu"))
        layers.call(0)
        gate = Gate()
        monkeypatch.setattr(UndrivenLauncher, "launch", gate)
        with (
            in_another_thread(lambda: layers.call(0), gate),
            pytest.raises(DeepMoEError, match=BUSY),
        ):
            layers.call(0)
        layers.call(0)
